"""`embq search`: one query to an index, in a local folder or behind an `embq serve`."""
