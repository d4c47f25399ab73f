"""`embq export`: committed rows as plain files for other tools."""
