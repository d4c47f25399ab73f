"""`python -m embq` is the command `embq`, and like it runs nothing of the current folder."""

import sys

if not sys.flags.safe_path:
    del sys.path[0]

from embq.app.cli.entry_point import main

main()
