"""Python processes of embq import nothing of the current folder, nor do those that they start."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import embq
from embq.core.process.children import python
from embq.core.settings import child_environment

PACKAGE = Path(embq.__file__).parent


@pytest.fixture
def trap(tmp_path: Path) -> Path:
    """A folder whose modules end the process that imports them."""
    for name in ("redis", "msgspec", "click", "worker", "core"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('code of the current folder ran')\n")
    return tmp_path


def test_python_is_started_in_one_place() -> None:
    starts = [
        file.relative_to(PACKAGE).as_posix()
        for file in PACKAGE.rglob("*.py")
        if re.search(r"\[\s*(sys\.executable|python|executable)\s*,", file.read_text(encoding="utf-8"))
    ]
    # The entry point runs itself again, with the options of Python that it was started with.
    assert sorted(starts) == ["app/cli/entry_point.py", "core/process/children.py"]


@pytest.mark.parametrize(
    "program",
    [
        "import redis",
        "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import redis'], check=True)",
        "import multiprocessing as m; m.get_context('spawn').Process(target=print).start()",
    ],
)
def test_a_child_and_its_children_import_what_is_installed(trap: Path, program: str) -> None:
    done = subprocess.run(
        python("-c", program), cwd=trap, env=child_environment(), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_python_m_embq_imports_what_is_installed(trap: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "embq", "--version"], cwd=trap, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, f"embq, version {embq.__version__}\n")
