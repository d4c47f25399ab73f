"""Kinds of input: splitting each into units, and reading a unit. `kinds` maps names and file suffixes to them."""
