"""`python -m embq` is the command `embq`."""

from embq.app.cli.entry_point import main

main()
