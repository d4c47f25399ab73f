"""What a laptop has to carry: few packages, and none of them imported before it is needed."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

LARGE = {"torch", "numpy", "faiss-cpu", "transformers", "h5py", "pillow", "starlette", "open_clip_torch", "pandas"}


def test_the_base_install_has_nothing_of_other_roles() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = {re.split(r"[\s;<>=!\[]", needed, maxsplit=1)[0] for needed in project["dependencies"]}
    assert "click" in names
    assert names.isdisjoint(LARGE)


def test_the_help_of_every_verb_needs_none_of_the_large_packages() -> None:
    script = (
        "import importlib, sys; from embq.cli import VERBS\n"
        "for verb in VERBS:\n"
        "    importlib.import_module(f'embq.verbs.{verb}')\n"
        "    found = {'numpy', 'pyarrow', 'redis', 'rq', 'fsspec', 'torch', 'faiss', 'rich'} & set(sys.modules)\n"
        "    assert not found, (verb, found)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
