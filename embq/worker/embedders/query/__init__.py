"""Models for queries, on the CPU and without torch if that is possible."""
