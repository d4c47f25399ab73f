"""Web pages: search, fleet and map."""
