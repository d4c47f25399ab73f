"""JSON that is hashed, or stored in an output folder or the broker, is byte for byte what earlier versions wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from embq.core.models import Chunking, ModelConfig, NamedModel
from embq.core.queue.runs import RunRecord
from embq.core.rows.spec import Column, RowSpec
from embq.core.run.commits import Commit, CommittedFile, CommittedUnit
from embq.core.units import Retry, Unit, canonical_json

STORED = json.loads(Path(__file__).with_name("stored_json.json").read_text(encoding="utf-8"))
"""Written by embq at 425d8f7."""

RETRY = Retry(unit=3, failed=4, record=5, attempts=1, replaces=2, only="0-3,7", keys="ab", samples=9)
UNITS = (
    Unit(kind="tar", source="/data/00000.tar", stop=10240, etag="1-10240"),
    Unit(kind="files", source="s3://b/p", items=(("a b.jpg", 3), ("ü.png", 4)), samples=2, etag="x"),
    Unit(
        kind="csv",
        source="/x.csv",
        start=5,
        stop=99,
        first=7,
        samples=12,
        options=(("text", "caption"),),
        retry=RETRY,
        size=77,
    ),
)
SEVERAL = (
    NamedModel(name="a", spec="open_clip:ViT-B-32/x", modalities=("image", "text")),
    NamedModel(name="b", spec="minilm", modalities=("text",)),
)
MODELS = (
    ModelConfig(spec="minilm", modalities=("text",), precision="fp32"),
    ModelConfig(spec="st:x", modalities=("text",), precision="bf16", chunking=Chunking(tokens=256, overlap=32)),
    ModelConfig(spec="st:x", modalities=("text",), precision="bf16", chunking=Chunking(tokens=256)),
    ModelConfig.several(SEVERAL, modalities=("image", "text"), precision="fp16", decode="gpu"),
)
ROWS = (
    RowSpec(),
    RowSpec(
        dtype="int8",
        truncate_dim=64,
        normalize=True,
        int8_range=0.5,
        similarity=True,
        columns=(Column(name="w", type="int64", path=("a", "w")),),
    ),
)


@pytest.mark.parametrize("number", range(3))
def test_units_and_their_ids(number: int) -> None:
    assert canonical_json(UNITS[number].describe()) == STORED["units"][number]
    assert UNITS[number].unit_id == STORED["ids"][number]
    assert Unit.from_description(json.loads(STORED["units"][number])) == UNITS[number]


@pytest.mark.parametrize("number", range(4))
def test_models_and_their_queues(number: int) -> None:
    assert json.dumps(MODELS[number].describe()) == STORED["models"][number]
    assert MODELS[number].queue_key == STORED["queues"][number]
    assert ModelConfig.from_description(json.loads(STORED["models"][number])) == MODELS[number]


@pytest.mark.parametrize("number", range(2))
def test_rows(number: int) -> None:
    assert json.dumps(ROWS[number].describe()) == STORED["rows"][number]
    assert json.dumps(ROWS[number].identity()) == STORED["identity"][number]
    assert RowSpec.from_description(json.loads(STORED["rows"][number])) == ROWS[number]


def test_commit_records() -> None:
    file = CommittedFile(path="parts/part-00000007.parquet", kind="rows", rows=3, bytes=99, sha256="s", first_id=12)
    units = (
        CommittedUnit(u=1, unit_id="i", token="t", first_row=0, rows=3, failures=1, truncated=2, tokens=5),
        CommittedUnit(u=2, unit_id="j", token="t", first_row=3, rows=0, failures=0, supersedes=1, lifts=1),
    )
    commit = Commit(
        n=7,
        run="0123456789abcdef",
        kind="data",
        prev="p",
        epoch=2,
        writer="w",
        version="0.1.0",
        generation="g",
        fingerprint="f",
        files=(file,),
        units=units,
        widths={"embedding": 384},
        totals={"units": 2},
        timing={"s": 1.5},
        created_at="2026-01-01T00:00:00Z",
    )
    data, digest = commit.seal()
    assert (data.decode(), digest) == (STORED["commit"], STORED["digest"])
    assert Commit.parse(STORED["commit"].encode(), "00000007.json").units == units


def test_run_records() -> None:
    record = RunRecord(run="0123456789abcdef", output="/data/out", model=MODELS[3], units=3, rows=ROWS[1], retries=1)
    assert record.to_json() == STORED["record"]
    assert RunRecord.from_json(STORED["record"]) == record
