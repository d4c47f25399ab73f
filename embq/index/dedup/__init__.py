"""Semantic deduplication: groups of rows whose vectors are near each other, found by the index."""
