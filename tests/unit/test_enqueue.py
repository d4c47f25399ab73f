"""Making a run, finding it again, and refusing to mix two."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from embq.core.errors import EmbqError, InputError
from embq.core.queue.keys import RUNS
from embq.core.queue.runs import RunRecord, registered
from embq.core.rows.spec import RowSpec
from embq.core.run.layout import Layout
from embq.core.run.manifest import Manifest
from embq.core.run.run_info import WorkerDefaults, load_run
from embq.producer import enqueue
from embq.producer.announce import announce, record_of
from embq.producer.enqueue import Planned, Request, prepare
from tests.support.outputs.run_case import MakeRun
from tests.support.planning import call_at_once, run_at_once, snapshot


def other_units(request: Request) -> Request:
    return replace(request, inputs=(request.inputs[0].replace("*", "a"),))


def test_defaults_of_workers_stand_in_the_run_and_in_its_record(request_: Request) -> None:
    plain = prepare(request_)
    assert b'"workers"' not in Layout(request_.output).run_json.read_bytes()
    assert '"workers"' not in record_of(plain.info, request_.output).to_json()
    defaults = WorkerDefaults(batch_size=512, prepare_threads=8)
    again = prepare(replace(request_, workers=defaults))
    assert again.info == plain.info, "they are of a new run"
    assert [one.partition(" has no effect")[0] for one in again.warnings] == ["--batch-size 512", "--threads 8"]
    assert not prepare(request_).warnings
    made = prepare(replace(request_, output=request_.output.with_name("other"), workers=defaults)).info
    assert load_run(request_.output.with_name("other")).workers == defaults
    record = RunRecord.from_json(record_of(made, request_.output).to_json())
    assert record is not None
    assert record.workers == defaults


def test_a_run_stands_in_its_folder_whole(request_: Request) -> None:
    planned = prepare(request_)
    assert planned.new
    assert load_run(request_.output) == planned.info
    manifest = Manifest(Layout(request_.output))
    assert (planned.info.units, planned.info.samples, len(manifest)) == (6, 50, 6)
    assert [unit.samples for unit in manifest] == [10, 10, 5, 10, 10, 5]
    assert planned.info.model.modalities == ("text",)
    assert list(Layout(request_.output).temporary.iterdir()) == []


def test_the_same_request_again_finds_the_run_and_changes_nothing(request_: Request) -> None:
    first = prepare(request_)
    before = snapshot(request_.output)
    again = prepare(request_)
    assert (again.new, again.info) == (False, first.info)
    assert snapshot(request_.output) == before


def test_what_does_not_decide_the_vectors_may_differ(request_: Request) -> None:
    first = prepare(request_)
    assert prepare(replace(request_, part_rows=7, version="later")).info == first.info


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"models": ("stub:5",)}, "model: stub:4 there, stub:5 asked for"),
        ({"rows": RowSpec(dtype="float32")}, "dtype: float16 there, float32 asked for"),
        ({"precision": "bf16"}, "precision: fp32 there, bf16 asked for"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_another_run_is_refused_with_the_difference(request_: Request, changes: dict[str, object], named: str) -> None:
    prepare(request_)
    before = snapshot(request_.output)
    with pytest.raises(InputError) as caught:
        prepare(replace(request_, **changes))  # type: ignore[arg-type]
    assert named in caught.value.message
    assert caught.value.code == "other_run"
    assert "embq resume" in caught.value.next_step
    assert snapshot(request_.output) == before


def test_every_difference_is_named_at_once(request_: Request) -> None:
    prepare(request_)
    with pytest.raises(InputError) as caught:
        prepare(replace(other_units(request_), models=("stub:5",), rows=RowSpec(dtype="float32")))
    assert caught.value.message.count(" asked for") == 2


def test_an_empty_folder_is_taken(request_: Request) -> None:
    request_.output.mkdir()
    assert prepare(request_).new


def test_what_a_killed_plan_left_behind_is_planned_over(request_: Request, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException):
        pass

    def kill(*args: object, **named: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("embq.core.run.run_info.write_first", kill)
        with pytest.raises(Killed):
            prepare(other_units(request_))
    assert not Layout(request_.output).run_json.exists()
    planned = prepare(request_)
    assert planned.new
    assert len(Manifest(Layout(request_.output))) == planned.info.units == 6


def test_units_are_the_same_on_every_plan(request_: Request, tmp_path: Path) -> None:
    first = prepare(request_)
    second = prepare(replace(request_, output=tmp_path / "out2"))
    one, two = (list(Manifest(Layout(root))) for root in (tmp_path / "out", tmp_path / "out2"))
    assert one == two
    assert first.info.manifest_digest == second.info.manifest_digest
    assert first.info.run != second.info.run, "what goes elsewhere is another run"


# --- at the same time ---


def test_a_plan_that_comes_late_does_not_replace_the_manifest_of_the_run(
    request_: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The second request looked for a run before the first one had made it, and writes its manifest after that.
    real = enqueue.refuse_foreign_files

    def late(layout: Layout) -> None:
        real(layout)
        monkeypatch.setattr(enqueue, "refuse_foreign_files", real)
        prepare(request_)

    monkeypatch.setattr(enqueue, "refuse_foreign_files", late)
    assert not prepare(other_units(request_)).added
    assert len(Manifest(Layout(request_.output))) == load_run(request_.output).units == 6


def test_many_processes_make_one_run(request_: Request) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom embq.producer.enqueue import Request, prepare\n"
        "from embq.core.process.libraries import leave_out_pandas\nleave_out_pandas()\n"
        "from embq.sources.reader_options import ReadOptions\nprint('ready', flush=True)\nsys.stdin.readline()\n"
        "print(prepare(Request(inputs=(sys.argv[1],), output=Path(sys.argv[2]), models=('stub:4',), modalities=(),"
        " precision='fp32', part_rows=1000, options=ReadOptions(unit_samples=10),"
        " version='test')).new)\n"
    )
    command = [sys.executable, "-c", code, request_.inputs[0], str(request_.output)]
    assert sorted(run_at_once(command, 3)) == ["False", "False", "True"]
    assert len(Manifest(Layout(request_.output))) == load_run(request_.output).units == 6


def test_many_threads_make_one_run(request_: Request) -> None:
    planned: list[Planned] = []
    refused: list[EmbqError] = []

    def make(_: int) -> None:
        try:
            planned.append(prepare(request_))
        except EmbqError as error:
            refused.append(error)

    call_at_once(make, 4)
    assert refused == []
    assert sorted(one.new for one in planned) == [False, False, False, True]
    assert len({one.info for one in planned}) == 1
    assert len(Manifest(Layout(request_.output))) == 6


# --- the broker ---


def test_announcing_a_run_twice_changes_nothing(request_: Request, client: redis.Redis, make_run: MakeRun) -> None:
    info = prepare(request_).info
    try:
        announce(client, info, request_.output)
        announce(client, info, request_.output)
        assert registered(client)[info.run] == record_of(info, request_.output)
        assert registered(client)[info.run].units == 6
    finally:
        client.hdel(RUNS, info.run)


def test_a_run_that_another_version_announced_is_left_to_that_version(client: redis.Redis) -> None:
    try:
        client.hset(RUNS, "future", '{"v": 99, "run": "future"}')
        assert "future" not in registered(client)
    finally:
        client.hdel(RUNS, "future")


@pytest.mark.parametrize("dtype", ["int8", "binary"])
def test_what_the_readers_of_npy_do_not_know_is_refused_before_anything_is_made(request_: Request, dtype: str) -> None:
    with pytest.raises(InputError) as caught:
        prepare(replace(request_, rows=RowSpec(dtype=dtype), format="npy"))
    assert caught.value.code == "format_dtype"
    assert not Path(request_.output).exists()
