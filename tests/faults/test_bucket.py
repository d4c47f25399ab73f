"""A run with its output on an object store that is in trouble, while its processes are killed."""

from __future__ import annotations

import json
from pathlib import Path

import boto3
import pytest

from embq.core.queue.keys import ACTIVE
from embq.core.run.run_info import load_run
from embq.core.storage.paths import place
from tests.e2e.check import check_complete
from tests.e2e.session import await_in, started, succeed, write_texts
from tests.faults.kit.cluster import QUICK_LEASES, Cluster
from tests.faults.kit.indexes import PATIENCE_S, Building, MakeBuilding, counted, crash
from tests.faults.test_storage import WRITES_PARTS
from tests.support.servers.storage import environment, s3_proxy, upload

DIM = 4


def download(prefix: str, folder: Path, *, run: bool = False) -> Path:
    """Everything below a prefix, such as the output of a run, copied without embq."""
    client = boto3.client("s3")
    for name in ("parts", "failures", "_staging", "_tmp") if run else ():  # a store has no empty folders
        (folder / name).mkdir(parents=True)
    for page in client.get_paginator("list_objects_v2").paginate(Bucket="bucket", Prefix=f"{prefix}/"):
        for one in page.get("Contents", ()):
            path = folder / one["Key"].removeprefix(f"{prefix}/")
            path.parent.mkdir(parents=True, exist_ok=True)
            client.download_file("bucket", one["Key"], str(path))
    return folder


def records(prefix: str) -> int:
    return int(boto3.client("s3").list_objects_v2(Bucket="bucket", Prefix=f"{prefix}/commits/")["KeyCount"])


@pytest.mark.fault("C1", "`embq run` into a bucket: its writer, then everything is killed; `embq resume`")
def test_a_run_whose_processes_are_killed_is_exact_in_the_bucket(s3: str, short_tmp: Path) -> None:
    expected = write_texts(short_tmp / "texts.jsonl", 200)
    prefix = short_tmp.name
    url = f"s3://bucket/{prefix}"
    options = ("-m", f"stub:{DIM}?ms_per_sample=12", "--unit-size", "10", "--write-batch-size", "20")
    with s3_proxy(s3) as proxy, environment({"AWS_ENDPOINT_URL": proxy.url, "XDG_STATE_HOME": str(short_tmp / "s")}):
        with started("run", short_tmp / "texts.jsonl", "-o", url, *options) as command:
            await_in(command, lambda: records(prefix) >= 2)
            writer = command.service("writer")
            assert writer is not None
            writer.kill()
            proxy.suffer("lost", 2)
            before = records(prefix)
            await_in(command, lambda: records(prefix) >= before + 2)
            command.kill_all()
        proxy.suffer("busy", 3)
        succeed("resume", url)
        assert proxy.left == 0
        report = json.loads(succeed("verify", url, "--json"))
        assert (report["ok"], report["state"], report["rows"]) == (True, "complete", 200)
        status = json.loads(succeed("status", url, "--json"))
        assert (status["state"], status["rows"], status["output"]) == ("done", 200, url)
        check_complete(download(prefix, short_tmp / "copy", run=True), expected, units=20, dim=DIM)
        epochs = {json.loads(path.read_bytes())["epoch"] for path in (short_tmp / "copy" / "commits").iterdir()}
        assert len(epochs) == 3, "the writer, the one in its place, and that of the resumed run"


@pytest.mark.fault("C1", "workers that share nothing but the bucket put parts there; they and the writer are killed")
def test_parts_of_workers_that_are_killed_are_once_in_the_bucket(s3: str, cluster: Cluster, tmp_path: Path) -> None:
    """Each of two workers dies before a put and after it, a writer before a copy, after it, and after the record."""
    cluster.write_texts(40)
    url = f"s3://bucket/{tmp_path.name}"
    model = ("-m", f"stub:{DIM}?ms_per_sample=5", "--unit-size", "10", "--write-batch-size", "30")
    broker = {"EMBQ_BROKER_URL": cluster.broker.url}
    succeed("enqueue", cluster.input, "-o", url, *model, environment=broker)
    in_store = "embq.core.storage.objects:ObjectPath"
    killed = [
        {"at": at, "when": when, "count": 3, "do": "kill", "marker": str(tmp_path / f"m{n}"), **more}
        for n, (at, when, more) in enumerate(
            [
                (f"{in_store}.upload", "before", {"match": "_staging", "times": 2}),
                (f"{in_store}.upload", "after", {"match": "_staging", "times": 2}),
                (f"{in_store}.copy", "before", {}),
                (f"{in_store}.copy", "after", {}),
                ("embq.writer.staging:drop_ref", "before", {}),
            ]
        )
    ]
    cluster.producer()
    here, there = ({"XDG_STATE_HOME": str(tmp_path / name)} for name in ("here", "there"))
    cluster.workers(count=2, environment={**QUICK_LEASES, **there}, sabotage=[WRITES_PARTS, *killed[:2]])
    for moment in killed[2:]:
        writer = cluster.writer(environment=here, sabotage=moment)
        assert writer.wait() == -9, writer.said
    cluster.writer(environment=here)
    client, run = cluster.broker.client(), load_run(place(url)).run
    cluster.until(lambda: not client.sismember(ACTIVE, run))  # all units are done before the log is closed
    cluster.recovery.injected(7)
    assert [number for number in range(5) if not list(tmp_path.glob(f"m{number}*"))] == []
    succeed("gc", url, "--older-than", "0", environment=broker)
    output = check_complete(download(tmp_path.name, tmp_path / "copy", run=True), cluster.expected, units=40, dim=DIM)
    assert 2 in {file["path"].count(".") for record in output.records for file in record["files"]}, "of a worker"
    assert json.loads(succeed("verify", url, "--json"))["ok"]


@pytest.mark.fault("X4", "an index is built in a bucket by two machines that share nothing else, and all are killed")
def test_an_index_in_a_bucket_is_that_of_a_folder_though_everybody_is_killed(
    s3: str, cluster: Cluster, make_building: MakeBuilding, undisturbed: Building, tmp_path: Path
) -> None:
    """Given a worker of each machine, two unit processes and the conductor killed, then files and answers are equal."""
    building = make_building(broker_url=cluster.broker.url)
    building.named = upload(building.source, "vectors")
    building.url = "s3://bucket/index"

    killed = [
        crash("embq.index.stages.task:_keep", tmp_path / "0", when="after", match="stage='add', number=1,"),
        crash("embq.index.stages.task:perform", tmp_path / "1", when="after", match="stage='merge', number=0,"),
    ]
    for number in range(2):
        cache = {"XDG_CACHE_HOME": str(tmp_path / f"cache-{number}")}
        cluster.workers(environment={**QUICK_LEASES, **cache}, sabotage=[*counted(building.folder), *killed])
    here = {**QUICK_LEASES, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    for moment in (
        crash("embq.index.stages.build:StageSequence.run", tmp_path / "2", match="'merge'"),
        crash("embq.index.index_files.publication:_announce", tmp_path / "3"),
    ):
        command = building.begin(environment=here, sabotage=[moment])
        assert command.wait(PATIENCE_S) == -9, command.said + cluster.logs()
    assert [number for number in range(4) if not (tmp_path / str(number)).exists()] == []
    cluster.recovery.injected(4)
    last = building.begin(environment=here)
    assert last.wait(PATIENCE_S) in (0, 3), last.said + cluster.logs()
    building.at = download("index", tmp_path / "copy")
    building.assert_published()
    building.assert_same_as(undisturbed)
    begun = building.begun()
    assert {stage: begun[stage] for stage in ("sample", "train", "tune")} == {"sample": 3, "train": 1, "tune": 1}
