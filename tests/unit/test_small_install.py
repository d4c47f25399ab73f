"""`pip install embq` is enough for what a laptop does, with few packages, and neither torch nor numpy among them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from embq.core.broker.embedded import EmbeddedServer
from embq.core.errors import Exit

WITHOUT_EXTRAS = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"numpy", "torch", "h5py", "faiss", "psutil", "starlette", "uvicorn", "PIL"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
from embq.app.cli.entry_point import run
sys.exit(run(sys.argv[1:]))
"""


def small(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run `embq` where no package of an extra can be imported."""
    command = [sys.executable, "-c", WITHOUT_EXTRAS, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_a_laptop_plans_hands_over_and_looks(
    own_server: EmbeddedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMBQ_BROKER_URL", own_server.url)
    inputs = tmp_path / "notes.jsonl"
    inputs.write_text("".join(json.dumps({"text": f"note {i}"}) + "\n" for i in range(30)))
    plan = [inputs, "-o", tmp_path / "out", "-m", "stub:8"]

    dry = small("enqueue", *plan, "--dry-run")
    done = small("enqueue", *plan, "--json")
    look = small("status", tmp_path / "out", "--json")

    assert dry.returncode == 0, dry.stderr
    assert done.returncode == 0, done.stderr
    assert look.returncode == 0, look.stderr
    assert json.loads(look.stdout)["run"] == json.loads(done.stdout)["run"]


def test_a_verb_that_needs_more_says_what_to_install(tmp_path: Path) -> None:
    done = small("verify", tmp_path)
    assert done.returncode == Exit.CONFIG
    assert "needs the package numpy" in done.stderr
    assert "pip install 'embq[all]'" in done.stderr


# --- what is imported and declared ---


ROOT = Path(__file__).resolve().parents[2]

LARGE = {"torch", "numpy", "faiss-cpu", "transformers", "h5py", "pillow", "starlette", "open_clip_torch", "pandas"}


def test_the_base_install_has_nothing_of_other_roles() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = {re.split(r"[\s;<>=!\[]", needed, maxsplit=1)[0] for needed in project["dependencies"]}
    assert "click" in names
    assert names.isdisjoint(LARGE)


def test_the_help_of_every_verb_needs_none_of_the_large_packages() -> None:
    script = (
        "import sys; import click; from embq.app.cli.entry_point import VERBS, cli\n"
        "for verb in VERBS:\n"
        "    group = cli.get_command(click.Context(cli), verb)\n"
        "    for name in getattr(group, 'later', ()):\n"
        "        group.get_command(click.Context(group), name)\n"
        "    found = {'numpy', 'pyarrow', 'redis', 'rq', 'fsspec', 'torch', 'faiss', 'rich'} & set(sys.modules)\n"
        "    assert not found, (verb, found)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
