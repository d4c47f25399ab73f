"""`pytest --release` builds and installs what users get."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip the tests of the release unless they were asked for: they make environments, one from the registry."""
    for item in items:
        if HERE in item.path.parents and not config.getoption("--release"):
            item.add_marker(pytest.mark.skip(reason="builds and installs the package: make test-release, or --release"))
