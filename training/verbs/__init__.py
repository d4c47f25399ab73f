"""The verbs of this package, one file each; `embq.cli.entry_point` finds them by the names of their modules."""
