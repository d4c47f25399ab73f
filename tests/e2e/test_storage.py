"""Runs whose inputs lie behind http://, from the command to the exact check; s3:// is in `test_far_output.py`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.check import check_complete
from tests.e2e.session import called, succeed, write_texts
from tests.support.servers.storage import http_server

DIM = 16


@pytest.mark.slow
def test_texts_from_a_server_that_cuts_its_answers(short_tmp: Path) -> None:
    (short_tmp / "web").mkdir()
    expected = write_texts(short_tmp / "web" / "texts.jsonl", 400)
    root = short_tmp / "out"
    with http_server(short_tmp / "web") as server:
        server.suffer("cut", 4)
        succeed("run", f"{server.url}/texts.jsonl", "-o", root, "-m", f"stub:{DIM}", "--unit-size", "50")
        assert server.left == 0
        check_complete(root, expected, units=8, dim=DIM)
        assert json.loads(succeed("verify", root, "--json"))["ok"]


def test_what_cannot_be_read_from_a_server_says_so(short_tmp: Path) -> None:
    (short_tmp / "web").mkdir()
    with http_server(short_tmp / "web") as server:
        status, _, stderr = called("run", f"{server.url}/a.tar", "-o", short_tmp / "out", "-m", f"stub:{DIM}")
        assert status == 65
        assert f"{server.url}/a.tar is not found" in stderr
        assert "Traceback" not in stderr
    assert not (short_tmp / "out" / "run.json").exists()
