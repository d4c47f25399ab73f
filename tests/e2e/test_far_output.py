"""Runs whose inputs and output are on an object store; killed ones are in `faults/test_bucket.py`."""

from __future__ import annotations

import json
from pathlib import Path

import boto3
import pytest

from tests.e2e.check import check_complete
from tests.e2e.session import called, succeed, write_shards, write_texts
from tests.support.servers.storage import environment, s3_proxy, upload

DIM = 16


@pytest.mark.slow
def test_shards_of_a_bucket_become_rows_of_another_and_everything_reads_them_there(s3: str, short_tmp: Path) -> None:
    expected = write_shards(short_tmp / "in" / "shards", 6, 20, captions=True)
    source = upload(short_tmp / "in", "inputs") + "/shards/{00000..00005}.tar"
    url, copy = f"s3://bucket/{short_tmp.name}", short_tmp / "copy"
    with environment({"XDG_STATE_HOME": str(short_tmp / "s")}):
        succeed("run", source, "-o", url, "-m", f"stub:{DIM}")
        report = json.loads(succeed("verify", url, "--json"))
        assert (report["ok"], report["state"], report["rows"]) == (True, "complete", 120)
        status = json.loads(succeed("status", url, "--json"))
        assert (status["state"], status["rows"], status["output"]) == ("done", 120, url)
    for folder in ("failures", "_tmp", "_staging"):  # a bucket has no empty ones
        (copy / folder).mkdir(parents=True)
    for listed in boto3.client("s3").list_objects_v2(Bucket="bucket", Prefix=f"{short_tmp.name}/")["Contents"]:
        path = copy / listed["Key"].removeprefix(f"{short_tmp.name}/")
        path.parent.mkdir(exist_ok=True)
        boto3.client("s3").download_file("bucket", listed["Key"], str(path))
    check_complete(copy, expected, units=6, dim=DIM)


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
