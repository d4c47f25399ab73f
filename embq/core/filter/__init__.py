"""Filters on the columns of rows: conditions, and the values that satisfy them."""
