"""Filters on the rows of an index: the rows that satisfy conditions, and columns to choose from."""
