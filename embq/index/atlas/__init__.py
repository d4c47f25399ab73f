"""The map of an index: rows as points in a plane, in clusters with labels."""
