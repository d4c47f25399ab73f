"""A browser for tests of pages: Debian's Chromium, driven by Playwright, which notes what a page does wrong."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page

CHROMIUM = shutil.which("chromium")

OPTIONS = (
    "--no-sandbox",
    *("--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--force-color-profile=srgb"),
)
"""Root needs the first; without the others Chromium asks hosts outside at its start."""

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(slots=True)
class Faults:
    """Errors of a page's console, exceptions of its scripts, and requests that left this machine."""

    errors: list[str] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)

    def expect(self, part: str) -> None:
        """Forget the errors that a test provokes; at least one has to be there."""
        expected = [one for one in self.errors if part in one]
        assert expected, self.errors
        self.errors = [one for one in self.errors if part not in one]


@contextmanager
def started_browser() -> Iterator[Browser]:
    """A headless browser; the test is skipped where there is none."""
    if CHROMIUM is None:
        pytest.skip("chromium is not on PATH: make test-pages installs it")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=[*OPTIONS])
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened_page(
    browser: Browser, *, width: int = 1440, height: int = 900, dark: bool = False
) -> Iterator[tuple[Page, Faults]]:
    """An empty page. At the end it must have no fault that was not expected."""
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme="dark" if dark else "light",
        permissions=["clipboard-read", "clipboard-write"],
    )
    page, faults = context.new_page(), Faults()
    page.set_default_timeout(15_000)
    page.on("console", lambda message: faults.errors.append(message.text) if _is_fault(message) else None)
    page.on("pageerror", lambda error: faults.errors.append(str(error)))
    page.on("request", lambda request: faults.outside.append(request.url) if _is_outside(request.url) else None)
    try:
        yield page, faults
        assert not faults.errors, faults.errors
        assert not faults.outside
    finally:
        context.close()


def until(page: Page, expression: str, deadline_s: float = 15.0) -> None:
    """Wait until an expression of JavaScript is true; Playwright's own way needs `eval`, which pages forbid."""
    end = time.monotonic() + deadline_s
    while not page.evaluate(expression):
        assert time.monotonic() < end, f"not true within {deadline_s:g} s: {expression}"
        page.wait_for_timeout(50)


def _is_fault(message: ConsoleMessage) -> bool:
    """True for an error, but for a picture that is asked for again because the server is busy."""
    busy = " 503 " in message.text and "/thumb/" in message.location["url"]
    return message.type == "error" and not busy


def _is_outside(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme in ("http", "https", "ws", "wss") and parts.hostname not in LOOPBACK


def serious_violations(page: Page) -> list[str]:
    """Violations of accessibility that axe-core calls serious or critical, a line each."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response["violations"]
    return [
        f"{one['id']}: {one['help']}: {[node['html'][:120] for node in one['nodes'][:3]]}"
        for one in found
        if one["impact"] in ("serious", "critical")
    ]
