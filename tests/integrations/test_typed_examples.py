"""A user's checker accepts embq's signatures: pyright, strict, on the examples."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_pyright_accepts_the_examples_in_strict_mode() -> None:
    pytest.importorskip("pyright")
    line = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout
    assert "0 errors, 0 warnings" in done.stdout
