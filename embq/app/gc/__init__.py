"""Garbage collection: orphaned files, and Redis keys of finished runs."""
