"""A folder that a killed process leaves is removed by the next one, and that of a living one never."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from embq.training.export.model_folder import new_folder
from embq.training.run.scratch import scratch

KILLED = """
import os, signal, sys
from pathlib import Path
from embq.training.export.model_folder import new_folder
from embq.training.run.scratch import scratch
place = Path(sys.argv[2])
with new_folder(place) if sys.argv[1] == "export" else scratch(place, "a-") as folder:
    (folder / "half").write_text("much")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def killed(*arguments: str) -> None:
    """A process that is killed while it fills its folder."""
    done = subprocess.run([sys.executable, "-c", KILLED, *arguments], check=False)
    assert done.returncode == -signal.SIGKILL


def test_the_next_one_removes_what_a_killed_one_left_and_nothing_that_lives(tmp_path: Path) -> None:
    other_host = tmp_path / "a-elsewhere-0123456789abcdef"
    own = tmp_path / f"a-{socket.gethostname()}-mine"
    for folder in (other_host, own):
        folder.mkdir()
    with scratch(tmp_path, "a-") as living:
        killed("scratch", str(tmp_path))
        assert len(list(tmp_path.iterdir())) == 4
        with scratch(tmp_path, "b-"):
            assert len(list(tmp_path.iterdir())) == 5  # another prefix is another's
        with scratch(tmp_path, "a-") as second:
            assert set(tmp_path.iterdir()) == {other_host, own, living, second}
    assert set(tmp_path.iterdir()) == {other_host, own}


def test_an_export_clears_what_a_killed_one_to_the_same_target_left(tmp_path: Path) -> None:
    killed("export", str(tmp_path / "model"))
    (left,) = tmp_path.iterdir()
    with new_folder(tmp_path / "another"):
        assert left.exists()
    with new_folder(tmp_path / "model") as folder:
        (folder / "whole").touch()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["another", "model"]
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["whole"]


def test_who_finds_its_new_folder_taken_for_a_left_one_makes_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, taken = fcntl.flock, []

    def swept_first(held: int, how: int) -> None:
        if not taken:
            taken.append(os.readlink(f"/proc/self/fd/{held}"))
            os.rmdir(taken[0])
        lock(held, how)

    monkeypatch.setattr(fcntl, "flock", swept_first)
    with scratch(tmp_path, "a-") as folder:
        assert folder.is_dir()
        assert str(folder) != taken[0]
