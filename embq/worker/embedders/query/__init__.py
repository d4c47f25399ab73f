"""Models for queries, on the CPU and without torch where that is possible."""
