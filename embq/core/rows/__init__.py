"""Rows of a run: what is stored of vectors and metadata, and a unit's result as bytes."""
