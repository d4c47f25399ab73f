"""Pictures of the web pages for README and docs, and a recording, of the runs that `make demo` leaves.

    python -m bench.pages [--outputs demo-output] [--folder docs/pictures]

Needs Debian's package chromium. Each page is taken at 1440 and 390 pixels, light and dark; the fleet while a run of a
stub model is at work on three simulated devices of unequal speed. The recording, pages.webp, is of a search, the
details of a row and the map.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

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

DEVICES, MODEL, ROWS, WORK_S = "sim:10,sim:4,sim:1", "stub:384?ms_per_sample=10", 400_000, 40.0
"""Of the run that is at work: devices, model, rows, and seconds until its pictures are taken."""

RECORDING = "pages"
QUESTION = "split text into words and sentences"
FRAME_SIZE, QUALITY, MOST_BYTES = (960, 600), 60, 1_000_000


def main() -> int:
    """Take the pictures; gives the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.pages")
    parser.add_argument("--outputs", type=Path, default=Path("demo-output"))
    parser.add_argument("--folder", type=Path, default=Path("docs/pictures"))
    parser.add_argument("--page", choices=[*PAGES, RECORDING], action="append")
    given = parser.parse_args()
    names = given.page or [*PAGES, RECORDING]
    working = running(given.outputs / "at-work") if "fleet" in names else nullcontext()
    with working, pages_of(given.outputs) as url, started_browser() as browser:
        if RECORDING in names:
            with opened_page(browser, width=FRAME_SIZE[0], height=FRAME_SIZE[1]) as (page, _):
                record(page, url, given.folder / f"{RECORDING}.webp")
        for name in [name for name in names if name in PAGES]:
            for ending, (width, height) in SIZES.items():
                for theme in ("", "-dark"):
                    with opened_page(browser, width=width, height=height, dark=bool(theme)) as (page, _):
                        take(page, url + PAGES[name], given.folder / f"{name}{ending}{theme}.jpg")
    return 0


@contextmanager
def running(output: Path) -> Iterator[None]:
    """A run that has been at work for a while, and is stopped and removed at the end of the block."""
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "notes.jsonl"
        rows.write_text("".join(json.dumps({"text": f"This is note number {n}."}) + "\n" for n in range(ROWS)))
        command = [sys.executable, "-m", "embq", "run", str(rows), "-o", str(output), "-m", MODEL, "--devices", DEVICES]
        with subprocess.Popen([*command, "--unit-size", "500"], stderr=subprocess.DEVNULL) as process:
            try:
                time.sleep(WORK_S)
                yield
            finally:
                process.terminate()
                process.wait()
                shutil.rmtree(output, ignore_errors=True)


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


def record(page: Page, url: str, path: Path) -> None:
    """Write an animation: a question is typed and answered, a row opened, the map shows the hits, pictures like one."""
    frames: list[tuple[Image.Image, int]] = []

    def shot(milliseconds: int, settle_ms: int = 0) -> None:
        page.wait_for_timeout(settle_ms)
        frames.append((Image.open(io.BytesIO(page.screenshot(caret="initial"))).convert("RGB"), milliseconds))

    page.goto(url + "/?index=texts:text")
    page.locator("text=The model is loading").wait_for(state="detached", timeout=120_000)
    for end in range(0, len(QUESTION) + 1, 5):
        page.locator("#q").fill(QUESTION[: end + 5])
        shot(220)
    page.locator("#q").press("Enter")
    shot(2500, SETTLE_MS)
    page.locator("a.details").first.click()
    shot(2500, 800)
    page.goto(f"{url}/map?index=texts:text&q={QUESTION.replace(' ', '+')}")
    shot(2500, SETTLE_MS)
    for _ in range(3):
        page.locator("#in").click()
        shot(500, 600)
    page.goto(url + "/?index=images:image")
    shot(1800, SETTLE_MS)
    page.locator("a[data-key=m]").nth(2).click()
    shot(2500, SETTLE_MS)
    first, *rest = [frame for frame, _ in frames]
    shown_ms = [milliseconds for _, milliseconds in frames]
    first.save(path, save_all=True, append_images=rest, duration=shown_ms, loop=0, quality=QUALITY, method=6)
    size = path.stat().st_size
    assert size < MOST_BYTES, f"{path} has {size:,} bytes"
    print(f"{path}  {size / 1000:,.0f} kB, {len(frames)} frames")


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
