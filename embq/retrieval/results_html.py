"""HTML of results for notebooks: no script, and every text escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from embq.app.output.html import shown

if TYPE_CHECKING:
    from embq.retrieval.searching.query import Result


def results_html(results: Sequence[Result], pictures: Sequence[str]) -> str:
    """Results as a grid of thumbnails if there are any, else as a table.

    Args:
        pictures: data: URL of each; "" for none.
    """
    if any(pictures):
        return f"<div style='display:flex;flex-wrap:wrap;gap:8px'>{''.join(map(_tile, results, pictures))}</div>"
    head = "<tr><th>score</th><th style='text-align:left'>key</th><th style='text-align:left'>caption</th></tr>"
    rows = "".join(
        f"<tr><td>{result.score:.3f}</td><td>{shown(result.key)}</td><td>{shown(result.caption or '')}</td></tr>"
        for result in results
    )
    return f"<table>{head}{rows}</table>"


def _tile(result: Result, picture: str) -> str:
    image = f"<img src='{escape(picture)}' style='width:160px;height:160px;object-fit:contain'>" if picture else ""
    caption = f"<figcaption>{result.score:.3f} {shown(result.key)}</figcaption>"
    return f"<figure style='width:160px;margin:0'>{image}{caption}</figure>"
