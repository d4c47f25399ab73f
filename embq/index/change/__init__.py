"""Changes to an existing index: growth, deletion, compaction, and the swap to the next version."""
