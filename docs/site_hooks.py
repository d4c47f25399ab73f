"""Hooks of mkdocs: links of a page to files of the repository outside of docs/.

Pictures are copied into the site. Other files are no part of it, so their links become plain text.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(!?)\[([^\]]*)\]\(((?:\.\./)+[^)\s#]+)(?:#[^)\s]*)?\)")


def _outside(page: str, target: str) -> str | None:
    """Path from the root of the repository; None for a target in docs/."""
    path = os.path.normpath(os.path.join("docs", os.path.dirname(page), target))
    return None if path.startswith("docs/") else path


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point pictures to their copies in the site, and unlink other files."""

    def mended(match: re.Match[str]) -> str:
        picture, text, target = match.groups()
        path = _outside(page.file.src_uri, target)
        if path is None:
            return match[0]
        if not picture:
            return text
        if files.get_file_from_path(path) is None:
            files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
        return f"![{text}]({os.path.relpath(path, os.path.dirname(page.file.src_uri) or '.')})"

    return LINK.sub(mended, markdown)
