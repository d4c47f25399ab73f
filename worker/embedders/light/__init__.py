"""Models of texts for one query, without torch: what takes seconds to import is not needed to embed ten words."""
