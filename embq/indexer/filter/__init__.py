"""Filters on the columns of rows: conditions, the rows that satisfy them, and columns to choose from."""
