"""Indexes over collections of vectors: planned, built in units, tuned, published, changed and searched."""
