"""A value of one run that no restart cures is refused with its run: every service goes on with the others."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis

from embq.core.broker.embedded import EmbeddedServer
from embq.core.errors import ConfigError, EmbqError, Exit
from embq.core.extras import missing
from embq.core.models import ModelConfig
from embq.core.queue.runs import register
from embq.core.rows.spec import RowSpec
from embq.core.service.stopping import StopFlag
from embq.core.settings import Settings
from embq.core.units import Sample, Unit
from embq.producer.feeder import Feeder
from embq.worker import model_service, process
from embq.worker.claim import scheduler
from embq.worker.embedders.stub import StubEmbedder
from embq.worker.stages import read as reading
from embq.worker.supervisor.protocol import WorkerOptions
from embq.writer.service import WriterService
from tests.support.outputs.run_case import DIM, make_case, sample
from tests.support.waiting import wait_until


def load(model: ModelConfig, device: str) -> StubEmbedder:
    """A model of four numbers; or what one of a plug-in raises that does not import."""
    if model.spec == "plugin":
        raise ConfigError("the plug-in x of y 1 cannot be imported", next_step="repair y")
    return StubEmbedder(model, dim=DIM, batch_size=1, s_per_sample=0.0, s_per_token=0.0, s_per_batch=0.0)


def read(unit: Unit, roots: object, on_progress: object, texts: bool) -> Iterator[Sample]:
    """Three samples; the units of two need a package that this machine lacks."""
    if unit.samples == 2:
        raise missing("h5py")
    return (sample(int(Path(unit.source).stem), ordinal) for ordinal in range(3))


class Worker:
    """A resident worker process, in a thread."""

    def __init__(self, url: str) -> None:
        self.error: EmbqError | None = None
        self._url, self._stopped = url, StopFlag()
        self._thread = threading.Thread(target=self._serve)

    def _serve(self) -> None:
        options: dict[str, Any] = {"device": "cpu", "transport": "payload", "version": "test", "batch_size": 0}
        worker = WorkerOptions(name="w", run="", prefetch=1, threads=1, drain_s=0.5, **options)
        try:
            process.run(worker, Settings(broker_url=self._url, slice_s=0.2), self._stopped)
        except EmbqError as error:
            self.error = error

    @property
    def ended(self) -> bool:
        """Whether it has ended by itself."""
        return not self._thread.is_alive()

    def __enter__(self) -> Worker:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.count = 1
        self._thread.join(20)


class Case:
    """A honest run and, with the same model, one whose user writes what its rights allow."""

    def __init__(self, client: redis.Redis, folder: Path) -> None:
        self.client = client
        self.honest, self.bad = make_case(client, folder / "honest"), make_case(client, folder / "bad", samples=2)
        self.bad.record = replace(self.bad.record, model=self.honest.record.model)

    def changed(self, **fields: Any) -> None:
        """Announce the bad run with other fields."""
        self.bad.record = replace(self.bad.record, **fields)
        register(self.client, self.bad.record)

    def finish_honest(self, worker: Worker) -> None:
        """Feed both runs, and write the honest one to its end."""
        feeder, writer = Feeder(self.client, lease_s=0.0), self.honest.writer()

        def finished() -> bool:
            assert not worker.ended, worker.error
            feeder.tick()
            writer.step()
            self.honest.clock.advance(31)
            return writer.finished

        wait_until(finished, 30)
        wanted = [f"{u}:{ordinal}" for u in range(8) for ordinal in range(3)]
        assert sorted(key for _, key, _ in self.honest.rows()) == wanted
        assert [id_ for id_, _, _ in self.honest.rows()] == list(range(24))


@pytest.fixture
def case(own_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    monkeypatch.setattr(model_service, "load", load)
    monkeypatch.setattr(reading, "read", read)
    monkeypatch.setattr(scheduler, "REFUSED_RETRY_S", 0.3)
    return Case(own_client, tmp_path)


def another_fingerprint(case: Case) -> None:
    case.client.hset(case.bad.key("meta"), "fingerprint", "0" * 32)


def other_widths(case: Case) -> None:
    case.changed(rows=RowSpec(truncate_dim=DIM + 1))


def a_model_that_does_not_load(case: Case) -> None:
    case.changed(model=replace(case.bad.record.model, spec="plugin"))


def inputs_that_need_a_missing_package(case: Case) -> None:
    """See `read`."""


@pytest.mark.parametrize(
    ("write", "code"),
    [
        (another_fingerprint, "wrong_model"),
        (other_widths, "wrong_dimension"),
        (a_model_that_does_not_load, "config"),
        (inputs_that_need_a_missing_package, "missing_package"),
    ],
)
def test_a_run_that_cannot_be_served_here_is_refused_alone(
    case: Case,
    own_server: EmbeddedServer,
    caplog: pytest.LogCaptureFixture,
    write: Callable[[Case], None],
    code: str,
) -> None:
    case.honest.build()
    case.bad.build()
    write(case)
    with caplog.at_level("ERROR", "worker"), Worker(own_server.url) as worker:
        case.finish_honest(worker)
        wait_until(lambda: "_refused" in caplog.text, 10)
    refusals = [record.getMessage() for record in caplog.records if "_refused" in record.getMessage()]
    assert [f"code={code}" in refusal for refusal in refusals] == [True], "it is told once"
    assert case.client.xlen(case.bad.key("res")) == case.client.hlen(case.bad.key("owner")) == 0
    assert set(case.client.hvals(case.bad.key("att"))) <= {b"0"}, "no unit is charged"


def test_a_run_that_comes_later_ends_no_worker_however_long_it_is_refused(
    case: Case, own_server: EmbeddedServer, caplog: pytest.LogCaptureFixture
) -> None:
    """It is the only one there is, and the worker has served nothing yet."""
    with caplog.at_level("INFO", "worker"), Worker(own_server.url) as worker:
        wait_until(lambda: case.client.client_list(), 10)
        wait_until(lambda: case.honest.client.info("stats")["total_commands_processed"] > 20, 10)
        case.bad.build()
        another_fingerprint(case)
        feeder = Feeder(case.client, lease_s=0.0)

        def refused_often() -> bool:
            feeder.tick()
            return caplog.text.count("run_refused") == 1

        wait_until(refused_often, 20)
        for _ in range(20):
            feeder.tick()
        assert not worker.ended
        case.honest.build()
        case.finish_honest(worker)


def test_a_worker_that_can_serve_nothing_that_was_there_when_it_began_ends_with_the_reason(
    case: Case, own_server: EmbeddedServer
) -> None:
    """Its weights or libraries are others than those of the fleet."""
    case.bad.build()
    another_fingerprint(case)
    with Worker(own_server.url) as worker:
        feeder = Feeder(case.client, lease_s=0.0)
        wait_until(lambda: (feeder.tick(), worker.ended)[1], 30)
    assert worker.error is not None
    assert (worker.error.code, worker.error.exit_code) == ("wrong_model", Exit.CONFIG)


def test_a_fingerprint_that_is_mended_is_served_again(case: Case, own_server: EmbeddedServer) -> None:
    """A laptop can write another one for a moment, until the writer restores it."""
    case.bad.build()
    case.honest.build()
    another = "0" * 32
    case.client.hset(case.honest.key("meta"), "fingerprint", another)
    with Worker(own_server.url) as worker:
        feeder = Feeder(case.client, lease_s=0.0)
        wait_until(lambda: (feeder.tick(), case.client.hlen(case.honest.key("att")))[1] == 0, 5)
        case.client.hdel(case.honest.key("meta"), "fingerprint")
        case.finish_honest(worker)


def test_no_record_of_a_run_ends_the_writer_or_the_producer(
    own_client: redis.Redis, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Outputs of all kinds that cannot be used here, beside an honest run that ends."""
    honest = make_case(own_client, tmp_path / "honest")
    register(own_client, honest.record)
    damaged, empty, pipe = tmp_path / "damaged", tmp_path / "empty", tmp_path / "pipe"
    make_case(own_client, damaged)
    for segment in (damaged / "manifest").iterdir():
        segment.write_bytes(b"PAR1 and no more")
    empty.mkdir()
    pipe.mkdir()
    os.mkfifo(pipe / "run.json")
    outputs = [str(path) for path in (damaged, empty, pipe, tmp_path / "none", honest.layout.parts)]
    outputs += ["/proc/1/x", "/dev/null/x"]
    for number, output in enumerate(outputs):
        run = f"{number:016x}"
        register(own_client, replace(honest.record, run=run, output=output))
        own_client.hset(f"embq:{{{run}}}:meta", mapping={"gen": "1", "state": "running", "total": 8, "v": 4})
    feeder = Feeder(own_client, lease_s=0.0)

    def ended() -> bool:
        feeder.tick()
        honest.work_off_hints()
        return honest.ledger.meta().get("state") == "done"

    end = time.monotonic() + 60
    WriterService(own_client, version="test").serve(lambda: ended() or time.monotonic() > end)
    honest.assert_exact()
