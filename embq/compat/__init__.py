"""Published commands and calls of other tools, by tables that turn their arguments into embq's."""
