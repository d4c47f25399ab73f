"""Every benchmark that the Makefile or the documentation names begins to measure."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "Makefile", ROOT / "CONTRIBUTING.md", ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMED = sorted({name for page in PAGES for name in re.findall(r"python -m (bench[\w.]*\w)", page.read_text("utf-8"))})
OF_OTHERS = {"bench.image_readers", "bench.text_ray", "bench.index_theirs"}
"""Benchmarks of peers, which run in environments of their own."""
LACKS = ("no CUDA device", "shows no GPU", "usage:", "not installed", "python -m bench.index makes it")
BEGINS_S = 15


def test_benchmarks_are_named() -> None:
    assert len(NAMED) > 30
    assert {name for name in NAMED if not (ROOT / f"{name.replace('.', '/')}.py").exists()} == set()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMED if name not in OF_OTHERS])
def test_a_benchmark_begins(name: str, short_tmp: Path) -> None:
    environment = {**os.environ, "BENCH_RESULTS": str(short_tmp), "TMPDIR": str(short_tmp), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-m", name],
        cwd=short_tmp,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as started:
        try:
            output, _ = started.communicate(timeout=BEGINS_S)
        except subprocess.TimeoutExpired as at_work:
            os.killpg(started.pid, signal.SIGKILL)
            output, code = (at_work.stdout or b"").decode(), 0
        else:
            code = started.returncode
    assert "Traceback" not in output, output
    assert code == 0 or any(words in output for words in LACKS), output
