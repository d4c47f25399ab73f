"""Pictures of the web pages for README and docs, of the runs that `make demo` leaves.

    python -m bench.pages [--outputs demo-output] [--folder docs/pictures]

Needs Debian's package chromium. Each page is taken at 1440 and 390 pixels, light and dark.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tests.ui.browser import opened_page, started_browser

if TYPE_CHECKING:
    from playwright.sync_api import Page

PAGES = {
    "search-images": "/?index=images:image",
    "search-texts": "/?index=texts:text&q=read+rows+from+a+file+with+comma+separated+values",
    "fleet": "/fleet",
    "map": "/map?index=texts:text",
}
"""Name of a picture -> address."""

SIZES = {"": (1440, 900), "-narrow": (390, 844)}
"""Ending of a picture's name -> width and height in pixels."""

SETTLE_MS = 2500
"""Time for thumbnails and points to be drawn."""


def main() -> int:
    """Take the pictures; gives the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.pages")
    parser.add_argument("--outputs", type=Path, default=Path("demo-output"))
    parser.add_argument("--folder", type=Path, default=Path("docs/pictures"))
    parser.add_argument("--page", choices=list(PAGES), action="append")
    given = parser.parse_args()
    with pages_of(given.outputs) as url, started_browser() as browser:
        for name in given.page or PAGES:
            for ending, (width, height) in SIZES.items():
                for theme in ("", "-dark"):
                    with opened_page(browser, width=width, height=height, dark=bool(theme)) as (page, _):
                        take(page, url + PAGES[name], given.folder / f"{name}{ending}{theme}.jpg")
    return 0


@contextmanager
def pages_of(outputs: Path, *options: str) -> Iterator[str]:
    """The URL of an `embq ui` that runs until the block ends."""
    command = [sys.executable, "-m", "embq", "ui", str(outputs), "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://\S+", process.stdout.readline())
            assert found is not None, "embq ui did not start"
            yield found[0]
        finally:
            process.terminate()


def take(page: Page, address: str, path: Path) -> None:
    """Write a picture of the part of a page that a window shows."""
    page.goto(address)
    page.locator("text=The model is loading").wait_for(state="detached", timeout=120_000)
    page.wait_for_load_state("load")
    page.wait_for_timeout(SETTLE_MS)
    page.screenshot(path=path, type="jpeg", quality=82)
    print(f"{path}  {path.stat().st_size / 1000:,.0f} kB")


if __name__ == "__main__":
    sys.exit(main())
