"""embq: embeddings of images and texts through a queue, on whatever GPUs there are."""

__version__ = "0.1.0"
