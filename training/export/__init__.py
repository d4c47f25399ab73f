"""From what a training left to a folder that the workers load."""
