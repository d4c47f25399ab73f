"""Kinds of input: how each splits into units, and how a unit is read. One file per kind; `kinds` maps names to them."""
