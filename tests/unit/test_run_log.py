"""Figures of a run in wandb and TensorBoard."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import click
import pytest

from embq.app.cli.entry_point import cli
from embq.app.status import run_log
from embq.app.status.broker_snapshot import Serving
from embq.app.status.run_log import EVERY_S, RunLog, check_targets, figures
from embq.app.status.run_progress import RunProgress
from embq.core.errors import ConfigError, UsageError
from embq.core.process.children import python
from embq.core.run.control import RunState
from embq.core.settings import child_environment
from embq.core.storage.paths import place

EMBED = {"embed": {"busy": 0.5, "starved": 0.25, "blocked": 0.25}}
WHOLE = {"limit": "device", "causes": {}, "stages": EMBED}

PROGRESS = RunProgress(
    run="r1",
    output="/out",
    model="stub:8",
    state=RunState.RUNNING,
    priority=10,
    rows=300,
    rows_total=400,
    rows_total_exact=True,
    failures=2,
    units_total=4,
    done=3,
    quarantined=0,
    received=0,
    in_flight=1,
    queued=0,
    rows_per_s=10.0,
    embedding_per_s=12.0,
    eta_s=9.5,
    limit="device",
    limits=Serving([{"attribution": {"threads": 1, "cores": 1, "decode": "", "whole": WHOLE}}]),
    workers=[{"name": "w1"}, {"name": "w2"}],
    timing={"load_s": 5.0, "embed_s": 30.0, "wall_s": 40.0},
)


class Recorder:
    """A `FigureLog` that keeps what is sent, or fails."""

    errors: ClassVar = (OSError,)

    def __init__(self, *, fails: bool = False) -> None:
        self.sent: list[tuple[int, Mapping[str, float]]] = []
        self.fails, self.closed = fails, False

    def send(self, figures: Mapping[str, float], rows: int) -> None:
        if self.fails:
            raise OSError("the disk is full")
        self.sent.append((rows, figures))

    def close(self) -> None:
        self.closed = True


def test_figures_have_the_names_of_clip_retrieval_and_those_of_status() -> None:
    found = figures(PROGRESS, workers=2)
    assert {name: value for name, value in found.items() if name.startswith(("sample", "total", "average"))} == {
        "sample_count": 300,
        "sample_per_sec": 7.5,
        "sample_per_sec_no_initial_load": 10.0,
        "total_job_duration": 40.0,
        "average_read_duration_per_sample": 0.05,
        "average_inference_duration_per_sample": 0.1,
        "average_write_duration_per_sample": 0.05,
        "average_total_duration_per_sample": 0.2,
    }
    status = PROGRESS.to_json()
    assert found["units/done"] == status["units"]["done"]
    assert (found["failures"], found["eta_s"], found["timing/load_s"]) == (2, 9.5, 5.0)
    assert not {"run", "model", "schema", "state"} & found.keys()


def test_a_run_without_rows_yet_has_figures_as_well() -> None:
    found = figures(replace(PROGRESS, rows=0, rows_per_s=0.0, timing={}, limits=Serving()), workers=1)
    assert {found["sample_per_sec"], found["average_total_duration_per_sample"]} == {0.0}


def test_figures_are_sent_at_intervals_and_at_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = [Recorder(fails=True), Recorder()]
    monkeypatch.setattr(run_log, "_tensorboard", lambda folder: logs.pop(0))
    monkeypatch.setattr(run_log, "check_targets", lambda targets: None)
    now, (broken, whole) = [0.0], tuple(logs)
    with RunLog(["tensorboard:a", "tensorboard:b"], Path("out"), run="r1", facts={}, clock=lambda: now[0]) as log:
        for now[0] in (0.0, EVERY_S - 1, EVERY_S, EVERY_S + 1):
            log.show(replace(PROGRESS, rows=int(now[0])))
        done = replace(PROGRESS, state=RunState.DONE, workers=[], rows=400)
        log.show(done, last=True)
    assert [rows for rows, _ in whole.sent] == [0, 5, 400]
    assert whole.sent[-1][1]["average_total_duration_per_sample"] == 0.2, "the two workers that were there count"
    assert (whole.closed, broken.closed) == (True, False)
    assert capsys.readouterr().err == "warning: no more figures are sent: the disk is full\n"


def test_figures_that_cannot_be_finished_end_no_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Unfinished(Recorder):
        def close(self) -> None:
            raise OSError("the disk is full")

    logs: list[Recorder] = [Unfinished(), whole := Recorder()]
    monkeypatch.setattr(run_log, "_tensorboard", lambda folder: logs.pop(0))
    monkeypatch.setattr(run_log, "check_targets", lambda targets: None)
    with RunLog(["tensorboard:a", "tensorboard:b"], Path("out"), run="r1", facts={}):
        pass
    assert whole.closed
    assert capsys.readouterr().err == "warning: no more figures are sent: the disk is full\n"


def test_a_target_that_cannot_be_opened_closes_those_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    logs = [first := Recorder()]
    monkeypatch.setattr(run_log, "_tensorboard", lambda folder: logs.pop(0))
    monkeypatch.setattr(run_log, "check_targets", lambda targets: None)
    with pytest.raises(IndexError):
        RunLog(["tensorboard:a", "tensorboard:b"], Path("out"), run="r1", facts={})
    assert first.closed


def test_a_missing_package_and_unusable_targets_are_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wandb").mkdir()  # of an earlier run
    monkeypatch.syspath_prepend(tmp_path)

    def missing(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(run_log, "distribution", missing)
    for target in ("wandb:mine", "tensorboard"):
        with pytest.raises(ConfigError, match="needs the package") as refused:
            check_targets([target])
        assert f"'embq[{target.partition(':')[0]}]'" in refused.value.next_step
    command = cli.get_command(click.Context(cli), "run")
    assert command is not None
    with pytest.raises(click.BadParameter, match="neither"):
        command.make_context("run", ["photos", "-o", "out", "-m", "stub:8", "--log", "mlflow"])
    with pytest.raises(UsageError, match="folder of this machine"):
        run_log._folder("", place("s3://bucket/out"))


def test_wandb_gets_the_run_under_its_id_and_neither_command_line_nor_secrets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: dict[str, Any] = {}

    class Failure(Exception):
        pass

    def init(**options: Any) -> Recorder:
        asked.update(options)
        if options["project"] == "closed":
            raise Failure("no key")
        recorder = Recorder()
        return SimpleNamespace(log=lambda figures: recorder.send(figures, 0), finish=recorder.close)  # type: ignore[return-value]

    wandb = ModuleType("wandb")
    ready = SimpleNamespace(settings=SimpleNamespace(root_dir="/logs"))
    wandb.__dict__.update(init=init, setup=lambda: ready, Settings=dict, errors=SimpleNamespace(Error=Failure))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr(run_log, "check_targets", lambda targets: None)
    model = "https://me:s3cret@host/model"
    with RunLog(["wandb"], place("s3://bucket/out"), run="r1", facts={"model": model}) as log:
        log.show(PROGRESS)
    assert (asked["project"], asked["id"], asked["resume"]) == ("embq", "r1", "allow")
    assert asked["config"] == {"model": "https://me:****@host/model", "output": "s3://bucket/out"}
    assert asked["settings"]["x_disable_meta"]
    with pytest.raises(ConfigError, match="no key") as refused:
        RunLog(["wandb:closed"], Path("out"), run="r1", facts={})
    assert "wandb login" in refused.value.next_step


def test_real_wandb_takes_no_settings_of_the_current_folder(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "settings").write_text("[default]\nbase_url = http://127.0.0.1:9\nentity = other\n")
    program = (
        "from embq.app.status.run_log import _wandb\n"
        "_wandb('p', run='r1', config={}, quiet=True)\n"
        "import wandb; print(wandb.run.settings.base_url, wandb.run.settings.entity, wandb.run.settings.root_dir)"
    )
    environment = child_environment(WANDB_MODE="offline")
    environment.pop("WANDB_DIR", None)
    done = subprocess.run(
        python("-c", program), cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert "127.0.0.1" not in done.stdout
    assert "other" not in done.stdout
    assert done.stdout.split()[-1] == str(tmp_path)


def test_real_wandb_and_tensorboard_take_the_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    with RunLog(["wandb:p", "tensorboard"], tmp_path / "out", run="r1", facts={}, quiet=True) as log:
        log.show(PROGRESS)
    assert list(tmp_path.glob("wandb/offline-run-*-r1/run-r1.wandb"))
    (file,) = (tmp_path / "out" / "_logs" / "tensorboard").iterdir()
    values = {
        value.tag: event.step for event in loader.EventFileLoader(str(file)).Load() for value in event.summary.value
    }
    assert values["sample_per_sec"] == 300
