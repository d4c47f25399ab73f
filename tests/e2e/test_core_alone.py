"""Runs need the core alone: no process that works on one imports a satellite."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from embq.core.settings import child_environment
from tests.e2e.session import write_texts


def imported(*arguments: str, folder: Path) -> set[str]:
    """The modules of embq that a command and the services that it starts import."""
    command = [sys.executable, "-m", "embq", *arguments]
    environment = child_environment() | {"PYTHONPROFILEIMPORTTIME": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    logs = [path.read_text() for path in (folder / "out" / "_logs").glob("*.log")]
    return {name for text in (done.stderr, *logs) for name in re.findall(r"\| +(embq[.\w]*)\n", text)}


def test_a_run_and_the_verbs_about_it_import_no_satellite(tmp_path: Path) -> None:
    write_texts(tmp_path / "a.jsonl", 50)
    names = imported("run", "a.jsonl", "-o", "out", "-m", "stub:8", folder=tmp_path)
    assert {"embq.producer.feeder", "embq.worker.model_service", "embq.writer.service"} <= names
    for verb in ("status", "retry", "verify", "failures", "resume"):
        names |= imported(verb, "out", folder=tmp_path)
    satellites = re.compile(r"embq\.(compat|fleet|index|integrations|lab|retrieval|training)\b")
    assert [name for name in names if satellites.match(name)] == []
