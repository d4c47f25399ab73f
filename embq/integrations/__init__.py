"""embq in other frameworks: retrievers over its indexes, embeddings over its models."""
