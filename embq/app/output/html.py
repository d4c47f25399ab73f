"""HTML of a run for notebooks: no script, and every text escaped."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from embq.core.redaction import cut, masked, printable

MOST_TEXT = 200
"""Characters of a text that are shown."""


def facts_html(facts: Mapping[str, str]) -> str:
    """Facts by their names, as a table."""
    rows = "".join(
        f"<tr><th style='text-align:left'>{name}</th><td>{shown(text)}</td></tr>" for name, text in facts.items()
    )
    return f"<table>{rows}</table>"


def shown(text: str) -> str:
    """A text as HTML, cut to `MOST_TEXT` characters."""
    return escape(printable(masked(cut(text, MOST_TEXT))))
