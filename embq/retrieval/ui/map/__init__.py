"""The map page, its data, and Embedding Atlas."""
