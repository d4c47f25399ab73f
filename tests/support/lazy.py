"""Packages that take seconds to import, imported at their first use: collecting tests needs none of them."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest


class _Module:
    """Stand for a module until one of its attributes is used."""

    def __init__(self, name: str) -> None:
        vars(self)["_name"] = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # as pytest reads `__test__` of all that a file has
            raise AttributeError(name)
        return getattr(import_module(self._name), name)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f'patch it by its path: monkeypatch.setattr("{self._name}.{name}", ...)')


def lazy(name: str) -> Any:
    """Return a module that is imported at its first use; skip the calling test file where its package is missing."""
    package = name.partition(".")[0]
    if find_spec(package) is None:
        pytest.skip(f"no {package}", allow_module_level=True)
    return _Module(name)
