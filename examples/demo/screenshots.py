"""Screenshots of the web pages, where this machine has a browser."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "microsoft-edge")
"""Names on PATH of browsers that take Chromium's options."""

START_S = 120.0
"""Deadline for the server: it loads the indexes first."""

LOAD_S = 60.0
"""Deadline for a page; thumbnails and the model take a few seconds on a slow machine."""


LIVE = ("/fleet",)
"""Pages with a stream that never ends: virtual time stands still for it."""


def screenshots(outputs: Path, folder: Path, pages: Mapping[str, str]) -> list[Path]:
    """Write a picture of each page of `embq ui OUTPUTS`; gives their paths, none where no browser is to be had.

    Args:
        pages: name of the picture -> path of the page.
    """
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    with _server(outputs) as url:
        made = [_picture(browser, url, path, folder / f"{name}.png") for name, path in pages.items()]
    return [path for path in made if path.exists()]


@contextmanager
def _server(outputs: Path) -> Iterator[str]:
    """The URL of an `embq ui` that runs until the block ends."""
    command = [sys.executable, "-P", "-m", "embq", "ui", str(outputs), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            if not select.select([process.stdout], [], [], START_S)[0]:
                raise TimeoutError("embq ui did not start")
            url = process.stdout.readline().split()[1]
            _wait_for_models(url)
            yield url
        finally:
            process.terminate()


def _wait_for_models(url: str) -> None:
    """Return once the server can embed texts, or after START_S."""
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        with urllib.request.urlopen(f"{url}/health", timeout=START_S) as answer:
            if all(one["model_state"] != "loading" for one in json.load(answer)["indices"]):
                return
        time.sleep(0.2)


def _picture(browser: str, url: str, page: str, path: Path) -> Path:
    """A page as PNG, 1,280 by 800 pixels; no file where the browser makes none in time."""
    path.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="embq-demo-", ignore_cleanup_errors=True) as profile:
        options = [
            *("--headless", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--disable-background-networking"),
            *("--disable-component-update", "--disable-sync", f"--user-data-dir={profile}", "--window-size=1280,800"),
            *(["--no-sandbox"] if os.geteuid() == 0 else []),
            f"--screenshot={path.resolve()}",
            "--timeout=4000" if page in LIVE else "--virtual-time-budget=15000",
        ]
        command = [browser, *options, url + page]
        with suppress(subprocess.TimeoutExpired):
            subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=LOAD_S, check=False)
    return path
