"""The verbs of this package, one file each; the command line finds them by the names of their modules."""
