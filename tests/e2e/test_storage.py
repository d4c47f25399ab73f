"""Runs whose inputs lie behind http:// and s3://, from the command to the exact check."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from e2e.check import check_complete
from e2e.session import ended, succeed, write_shards, write_texts

from tests.support.servers.storage import http_server, s3_server, upload

DIM = 16


def test_shards_of_a_bucket(short_tmp: Path) -> None:
    expected = write_shards(short_tmp / "in" / "shards", 6, 20, captions=True)
    root = short_tmp / "out"
    with s3_server() as environment:
        url = upload(short_tmp / "in", "bucket")
        source = url + "/shards/{00000..00005}.tar"
        succeed("run", source, "-o", root, "-m", f"stub:{DIM}", environment=environment)
        check_complete(root, expected, units=6, dim=DIM)
        assert json.loads(succeed("verify", root, "--json", environment=environment))["ok"]


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
        status, _, stderr = ended("run", f"{server.url}/a.tar", "-o", short_tmp / "out", "-m", f"stub:{DIM}")
        assert status == 65
        assert f"{server.url}/a.tar is not found" in stderr
        assert "Traceback" not in stderr
    assert not (short_tmp / "out" / "run.json").exists()
