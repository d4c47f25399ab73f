"""The index over a collection of vectors: planned, trained, filled, merged, tuned, published and searched."""
