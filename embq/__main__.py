"""`python -m embq` is the command `embq`."""

from embq.cli import main

main()
