"""Search of indexes and outputs: `embq search`, `embq serve`, the pages, embeddings over HTTP."""
