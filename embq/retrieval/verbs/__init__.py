"""The verbs of searching and serving."""
