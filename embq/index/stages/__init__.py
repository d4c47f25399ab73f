"""Building an index: stages and their units, the runners that execute them, and the report."""
