"""Why a log has no total: iterations are missing, or it contradicts itself or the arguments of its training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from training.mmoclip import required
from training.mmoclip.folder import Training
from training.openclip.log import Log

LOSS_TOLERANCE = 0.05
"""Between neighbours in bf16, at a loss of 9.7, lie 0.06; half as many processes are 0.69 less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """What is wrong with a log, in sentences."""

    contradictions: tuple[str, ...]
    missing: tuple[str, ...]

    @property
    def any(self) -> bool:
        """Whether there is any."""
        return bool(self.contradictions or self.missing)


def faults(training: Training) -> Faults:
    """All that is wrong with a training's log."""
    log = training.log
    if not log.iterations:
        return Faults(contradictions=(), missing=(_unfinished(0, None) + _ending(training),))
    if log.restarts:
        where = ", ".join(map(str, log.restarts[:3]))
        return Faults(
            contradictions=(f"{log.path} holds {len(log.restarts) + 1} trainings: another begins at line {where}",),
            missing=(),
        )
    contradictions = (*_other_arguments(training), *_other_figures(training))
    return Faults(contradictions=contradictions, missing=() if contradictions else _missing(training))


def _other_arguments(training: Training) -> list[str]:
    """Arguments that `params.txt` and the log tell differently."""
    params, said = training.params, training.log.settings
    other = [name for name in params if name in said and said[name] != params[name]]
    return [
        f"params.txt is of another training: {name} is {params[name]} there and {said[name]} in the log"
        for name in other[:3]
    ]


def _other_figures(training: Training) -> list[str]:
    """Arguments that the lines of the iterations contradict."""
    log, settings = training.log, training.settings
    found = []

    def compare(name: str, told: int | None, where: str) -> None:
        if told is not None and name in settings and settings[name] != str(told):
            found.append(f"the log is of another training: {name} is {settings[name]}, but {where} {told}")

    compare("world_size", log.world_size, "its rates are those of")
    compare("train_num_samples", log.samples, "its lines count to")
    world = log.world_size or 1
    if log.global_batch is not None and settings.get("log_every_n_steps") == "1" and settings.get("accum_freq") == "1":
        compare("batch_size", log.global_batch // world, "its lines are as far apart as with")
    return found or _other_loss(log, settings)


def _other_loss(log: Log, settings: Mapping[str, str]) -> list[str]:
    """With one pair repeated, the loss is ln(global batch): of other processes, or other data, it is not."""
    if broken := [one.at for one in log.iterations if one.loss is not None and not math.isfinite(one.loss)]:
        return [f"the loss is no number from line {broken[0]} on: the training broke"]
    if settings.get("dataset_type", "synthetic") != "synthetic" or settings.get("siglip") == "True":
        return []
    if settings.get("accum_freq", "1") != "1" or settings.get("log_every_n_steps", "1") != "1":
        return []
    if log.global_batch is None or not log.losses:
        return []
    expected = math.log(log.global_batch)
    far = max(log.losses, key=lambda loss: abs(loss - expected))
    if abs(far - expected) <= LOSS_TOLERANCE:
        return []
    return [
        f"the loss is {far:g}, and with made-up pairs it is ln(global batch): {expected:.4f} for {log.global_batch:,}, "
        f"so this loss is of {round(math.exp(min(far, 40.0))):,} pairs, or of other data"
    ]


def _missing(training: Training) -> tuple[str, ...]:
    """Iterations that the log lacks."""
    log, settings = training.log, training.settings
    world, batch = log.world_size or 1, log.global_batch or 1
    epochs = int(settings["epochs"]) if settings.get("epochs", "").isdigit() else 1
    expected = epochs * required.iterations(log.samples or 0, world, batch // world)
    done, every = len(log.iterations), settings.get("log_every_n_steps", "1")
    if every != "1":
        return (f"the log has a line for every {every} iterations, and the total needs one for each",)
    counts = [one.samples for one in log.iterations if one.epoch == log.iterations[0].epoch]
    if done < expected or log.iterations[-1].percent != 100:
        return (_unfinished(done, expected) + _ending(training),)
    if counts != [batch * (i + 1) for i in range(len(counts))] or done > expected:
        return (f"its lines do not count up in steps of {batch:,}: some are missing, or of another training",)
    return ()


def _unfinished(done: int, expected: int | None) -> str:
    return f"unfinished, {done} of {expected} iterations" if expected else "unfinished, no iteration is in the log"


def _ending(training: Training) -> str:
    """How an unfinished log ends, as far as that is known."""
    broken, launch = training.log.broken, training.launch
    cut = f"; line {broken[0]} is cut" if broken else ""
    words = f"; {launch['last_words']}" if launch.get("last_words") else ""
    status = f"; the training ended with status {launch['status']}" if launch.get("status") else ""
    return cut + status + words
