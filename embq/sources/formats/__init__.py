"""One module for each kind of input: how it splits into units, and how a unit is read."""
