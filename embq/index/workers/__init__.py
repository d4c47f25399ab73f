"""Builds of an index on workers: the conductor's side, the records in the broker, and the worker's side."""
