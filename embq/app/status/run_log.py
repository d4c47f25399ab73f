"""Sends the progress of a run to wandb or TensorBoard: `--log`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import click

from embq.app.status.run_progress import RunProgress
from embq.core.errors import ConfigError, UsageError
from embq.core.extras import missing
from embq.core.process.current_folder import set_up_wandb
from embq.core.redaction import masked
from embq.core.run.layout import Layout
from embq.core.storage.paths import Place

EVERY_S = 5.0
"""Between two points of a curve, as in clip-retrieval."""

PROJECT = "embq"


@dataclass(frozen=True, slots=True)
class FigureLog:
    """A place that figures are sent to.

    Attributes:
        send: send figures, as they are after a number of committed rows.
        close: wait until all are sent.
        errors: errors of both after which the place is left out.
    """

    send: Callable[[Mapping[str, float], int], object]
    close: Callable[[], object]
    errors: tuple[type[Exception], ...]


def check_targets(targets: Sequence[str]) -> None:
    """ConfigError if the package of a target of `--log` is not installed."""
    for target in targets:
        package = target.partition(":")[0]
        try:
            distribution(package)  # and not `find_spec`, which takes the folder `wandb` that wandb makes for a package
        except PackageNotFoundError:
            raise missing(package, f"--log {target} needs the package {package}") from None


class RunLog:
    """Sends the progress of one run to all targets of `--log`. A target that fails is left out, with a warning.

    Args:
        targets: "wandb", "wandb:PROJECT", "tensorboard" or "tensorboard:FOLDER".
        run: id of the run, which a resumed one goes on with.
        facts: constants of the run, for wandb.
        quiet: whether wandb may print nothing.

    Raises ConfigError if a target cannot be opened.
    """

    def __init__(
        self,
        targets: Sequence[str],
        output: Place,
        *,
        run: str,
        facts: Mapping[str, str],
        quiet: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_targets(targets)
        self._clock = clock
        self._due = 0.0
        self._workers = 1
        self._logs: list[FigureLog] = []
        try:
            for target in targets:
                kind, _, rest = target.partition(":")
                if kind == "wandb":
                    config = {name: masked(fact) for name, fact in {**facts, "output": str(output)}.items()}
                    self._logs.append(_wandb(rest or PROJECT, run=run, config=config, quiet=quiet))
                else:
                    self._logs.append(_tensorboard(_folder(rest, output)))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> RunLog:
        return self

    def show(self, progress: RunProgress, *, last: bool = False) -> None:
        """Send the figures of a progress, if the last ones are old enough or these are the last."""
        self._workers = len(progress.workers) or self._workers
        if not self._logs or (self._clock() < self._due and not last):
            return
        self._due = self._clock() + EVERY_S
        sent = figures(progress, self._workers)
        for log in list(self._logs):
            try:
                log.send(sent, progress.rows)
            except log.errors as error:
                _warn(error)
                self._logs.remove(log)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait until all figures are sent."""
        for log in self._logs:
            try:
                log.close()
            except log.errors as error:
                _warn(error)


def _warn(error: Exception) -> None:
    click.echo(f"warning: no more figures are sent: {masked(str(error))}", err=True)


def figures(progress: RunProgress, workers: int) -> dict[str, float]:
    """Figures of a run: those that clip-retrieval sends under its names, and those of `embq status --json`.

    The averages are seconds of one worker per row: waiting for samples (read), computing (inference) and waiting for
    the results to be taken (write); they add up to the total but for rounding.

    Args:
        workers: number of worker processes.
    """
    per_s, wall_s = progress.rows_per_s, progress.timing.get("wall_s", 0.0)
    embed = progress.limits.so_far.stages.get("embed", {})
    row_s = workers / per_s if per_s else 0.0
    return {
        "sample_count": progress.rows,
        "sample_per_sec": per_s * progress.timing.get("embed_s", 0.0) / wall_s if wall_s else 0.0,
        "sample_per_sec_no_initial_load": per_s,
        "total_job_duration": wall_s,
        "average_read_duration_per_sample": row_s * embed.get("starved", 0.0),
        "average_inference_duration_per_sample": row_s * embed.get("busy", 0.0),
        "average_write_duration_per_sample": row_s * embed.get("blocked", 0.0),
        "average_total_duration_per_sample": row_s,
        **dict(_numbers({name: value for name, value in progress.to_json().items() if name != "schema"})),
    }


def _numbers(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, float]]:
    """(path of names with "/" between them, number) of each number in nested mappings."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{above}{name}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield f"{above}{name}", value


def _folder(named: str, output: Place) -> Path:
    if named:
        return Path(named)
    if isinstance(output, Path):
        return Layout(output).logs / "tensorboard"
    raise UsageError("--log tensorboard writes to a folder of this machine", next_step="--log tensorboard:FOLDER")


def _wandb(project: str, *, run: str, config: dict[str, str], quiet: bool) -> FigureLog:
    """A run in wandb, under the id of embq's run. wandb's own variables say where to: WANDB_API_KEY, WANDB_MODE."""
    import wandb

    errors = (wandb.errors.Error, OSError)
    # Without `x_disable_meta` the command line would be sent, in which URLs may hold secrets.
    settings = wandb.Settings(console="off", silent=quiet, x_disable_meta=True, disable_git=True)
    try:
        set_up_wandb()
        log = wandb.init(project=project, id=run, resume="allow", config=config, settings=settings)
    except errors as error:
        raise ConfigError(
            f"--log wandb: {masked(str(error))}", next_step="run `wandb login`, or set WANDB_MODE=offline"
        ) from error
    return FigureLog(lambda figures, _rows: log.log(dict(figures)), log.finish, errors)


def _tensorboard(folder: Path) -> FigureLog:
    """Scalars in TensorBoard's files, over the number of rows."""
    from tensorboard.summary import Writer

    try:
        folder.mkdir(parents=True, exist_ok=True)
        writer = Writer(str(folder))
    except OSError as error:
        raise ConfigError(
            f"--log tensorboard: {folder} cannot be written: {error.strerror}",
            next_step="name another one: --log tensorboard:FOLDER",
        ) from error

    def send(figures: Mapping[str, float], rows: int) -> None:
        for name, value in figures.items():
            writer.add_scalar(name, value, rows)
        writer.flush()

    return FigureLog(send, writer.close, (OSError,))
