"""`python -m embq` is the command `embq`."""

from embq.cli.entry_point import main

main()
