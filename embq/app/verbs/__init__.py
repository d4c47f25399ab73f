"""One file per verb of the command line. A verb imports what it needs inside, so that `embq --help` stays quick."""
