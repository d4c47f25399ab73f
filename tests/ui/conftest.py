"""Fixtures of the tests of pages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.ui.browser import started_browser

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for the tests of a file.

    Playwright's event loop runs in this thread for as long, so that no test of the file may start another.
    """
    with started_browser() as browser:
        yield browser
