"""Kinds of input: how each splits into units, and how a unit is read. `kinds` maps names and file suffixes to them."""
