"""Embedding in the calling process, and runs that a program starts: what `import embq` offers beside search."""
