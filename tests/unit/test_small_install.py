"""What a laptop installs is enough for what a laptop does: `pip install embq` brings neither torch nor numpy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from core.broker.embedded import EmbeddedServer
from core.errors import Exit

WITHOUT_EXTRAS = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"numpy", "torch", "h5py", "faiss", "psutil", "starlette", "uvicorn", "PIL"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
from embq.cli.entry_point import run
sys.exit(run(sys.argv[1:]))
"""


def small(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run `embq` where no package of an extra can be imported."""
    command = [sys.executable, "-c", WITHOUT_EXTRAS, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_a_laptop_plans_hands_over_and_looks(own_server: EmbeddedServer, tmp_path: Path) -> None:
    inputs = tmp_path / "notes.jsonl"
    inputs.write_text("".join(json.dumps({"text": f"note {i}"}) + "\n" for i in range(30)))
    plan = [inputs, "-o", tmp_path / "out", "-m", "stub:8", "--broker", own_server.url]

    dry = small("enqueue", *plan, "--dry-run")
    done = small("enqueue", *plan, "--json")
    look = small("status", tmp_path / "out", "--broker", own_server.url, "--json")

    assert dry.returncode == 0, dry.stderr
    assert done.returncode == 0, done.stderr
    assert look.returncode == 0, look.stderr
    assert json.loads(look.stdout)["run"] == json.loads(done.stdout)["run"]


def test_a_verb_that_needs_more_says_what_to_install(tmp_path: Path) -> None:
    done = small("verify", tmp_path)
    assert done.returncode == Exit.CONFIG
    assert "needs the package numpy" in done.stderr
    assert "pip install 'embq[all]'" in done.stderr
