"""A table of lines for the terminal."""

from __future__ import annotations

import io

from rich.console import Console

from embq.app.status.display import FittedTable


def test_a_line_of_a_table_is_cut_at_the_width_and_wide_letters_count_twice() -> None:
    console = Console(file=io.StringIO(), width=12)
    console.print(FittedTable([{"name": "日本", "done": "1"}, {"name": "a\x1bb\n", "done": "23456789"}], ()))
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert printed == "name       …\n日本       …\na\\x1bb\\n  2…\n"
