"""Models: one file per family. `registry.load` turns a model config into an `Embedder`."""
