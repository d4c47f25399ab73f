"""The verbs of this package, one file each; `embq.cli` finds them by the names of their modules."""
