"""autofaiss' own tests of `build_index`, out of its source distribution, with embq's in its place."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from embq.compat.autofaiss import build_index
from embq.core.errors import UsageError

TESTS = next(Path(sys.prefix).glob("src/autofaiss-*/tests/unit"))
FILES = ("test_quantize", "test_np_quantize", "test_scoring_tuning")
"""The others test functions that `build_index` calls."""
pytestmark = pytest.mark.filterwarnings("default")


def _left_out(name: str) -> Any:
    def refuse(*_: Any, **__: Any) -> None:
        raise UsageError(f"embq has no {name} of autofaiss", next_step="see docs/how-to/index/from-autofaiss.md")

    return refuse


peer = ModuleType("autofaiss")
others = ("build_partitioned_indexes", "tune_index", "score_index")
vars(peer).update({name: _left_out(name) for name in others}, build_index=build_index)
with pytest.MonkeyPatch.context() as patch:
    patch.setitem(sys.modules, "autofaiss", peer)
    patch.syspath_prepend(TESTS)
    for file in FILES:
        tests = vars(importlib.import_module(file)).items()
        globals().update({name: test for name, test in tests if name.startswith("test_")})


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls without `index_path` write into the working directory."""
    monkeypatch.chdir(tmp_path)
