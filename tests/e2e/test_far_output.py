"""Runs whose output is on an object store; killed ones are in `faults/test_bucket.py`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from e2e.session import called, succeed, write_texts

from core.storage.object_clients import connect
from tests.support.servers.storage import environment, s3_proxy


@pytest.fixture(autouse=True)
def _no_client_outlives_its_server() -> Iterator[None]:
    connect.cache_clear()
    yield
    connect.cache_clear()


def test_a_run_ends_in_the_bucket_and_everything_reads_it_there(s3: str, short_tmp: Path) -> None:
    write_texts(short_tmp / "texts.jsonl", 40)
    url = f"s3://bucket/{short_tmp.name}"
    with environment({"XDG_STATE_HOME": str(short_tmp / "s")}):
        succeed("run", short_tmp / "texts.jsonl", "-o", url, "-m", "stub:4", "--unit-size", "10")
        report = json.loads(succeed("verify", url, "--json"))
        assert (report["ok"], report["state"], report["rows"]) == (True, "complete", 40)
        status = json.loads(succeed("status", url, "--json"))
        assert (status["state"], status["rows"], status["output"]) == ("done", 40, url)


@pytest.mark.parametrize(
    ("output", "status", "said"),
    [
        ("s3://nobucket/out", 74, "the bucket does not exist"),
        ("s3://key:secret@bucket/out", 2, "with a user or a key in it is not taken"),
        ("https://example.org/out", 2, "nothing can be written there"),
    ],
)
def test_an_output_that_cannot_be_is_one_clear_error(
    s3: str, short_tmp: Path, output: str, status: int, said: str
) -> None:
    write_texts(short_tmp / "texts.jsonl", 5)
    ended_with, _, stderr = called("run", short_tmp / "texts.jsonl", "-o", output, "-m", "stub:4")
    assert (ended_with, said in stderr) == (status, True), stderr
    assert "Traceback" not in stderr
    assert "secret" not in stderr


def test_a_store_without_conditional_create_is_refused_before_anything_is_written(s3: str, short_tmp: Path) -> None:
    write_texts(short_tmp / "texts.jsonl", 5)
    with s3_proxy(s3) as proxy, environment({"AWS_ENDPOINT_URL": proxy.url}):
        proxy.deaf = True
        url = f"s3://bucket/{short_tmp.name}"
        status, _, stderr = called("run", short_tmp / "texts.jsonl", "-o", url, "-m", "stub:4")
        assert (status, "created twice" in stderr) == (78, True), stderr
        listed = boto3.client("s3").list_objects_v2(Bucket="bucket", Prefix=short_tmp.name)
        assert listed["KeyCount"] == 0
