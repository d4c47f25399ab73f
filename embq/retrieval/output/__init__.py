"""Searches of an opened output, and how notebooks show its rows."""
