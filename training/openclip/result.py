"""What a training by open_clip came to, by what its processes left in its folder."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from core.errors import OutputError
from training.openclip.checkpoints import epochs_done
from training.openclip.flags import absolute
from training.openclip.folder import LOG, Begun
from training.openclip.log import parse
from training.openclip.plan import KEYS, UNREADABLE, Plan
from training.openclip.unreadable import noted


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a training came to.

    Attributes:
        epochs: that are over.
        samples_per_s: of all processes, without the first iteration; None where there were fewer than two.
        unreadable: shards, and members of shards, that a process could not read, in this start or an earlier one.
        unheard: processes of which nobody here knows what they could not read: their host has another --out.
        inexact: for each epoch of an exact training that was none, why.
    """

    epochs: int
    samples_per_s: float | None
    unreadable: tuple[str, ...]
    unheard: int
    inexact: tuple[str, ...]


def result_of(plan: Plan, begun: Begun) -> Result:
    """Look at what a training left, after its last process has ended; OutputError where it left it somewhere else."""
    log = begun.folder / LOG
    try:
        written = log.read_bytes()
    except FileNotFoundError as error:
        raise OutputError(
            f"the training is over, and its log is not {log}: the first host has another {begun.folder}",
            next_step="look there for its checkpoints; an --out that all hosts share with this machine has them here",
        ) from error
    now, ever = (
        parse(log, part.decode(errors="replace").splitlines()) for part in (written[begun.log_bytes :], written)
    )
    iterations = now.iterations[1:]
    heard, unreadable = noted(begun.folder / UNREADABLE)
    epochs = range(plan.settings.epochs) if plan.asked.exact else ()
    return Result(
        epochs=epochs_done(begun.folder),
        samples_per_s=sum(one.per_s for one in iterations) / len(iterations) if iterations else None,
        unreadable=tuple(f"{shard} {member}".rstrip() for shard, member in unreadable),
        unheard=max(0, int(ever.settings.get("world_size", 1)) - heard),
        inexact=tuple(said for epoch in epochs if (said := _inexact(plan, begun.folder / KEYS, epoch))),
    )


def _inexact(plan: Plan, folder: Path, epoch: int) -> str:
    """Why an epoch had not each sample once, by what every process wrote down; "" where it had."""
    seen: Counter[str] = Counter()
    for path in folder.glob(f"epoch-{epoch}-rank-*.txt"):
        seen.update(path.read_text(encoding="utf-8").splitlines())
    again = [line for line, times in seen.items() if times > 1]
    missing = plan.samples - len(seen)
    if not missing and not again:
        return ""
    of_shards = Counter(line.partition("\t")[0] for line in seen)
    expected = zip(absolute(plan.shards.urls), plan.shards.counts or (), strict=True)
    short = [f"{os.path.basename(url)} ({lack:,})" for url, count in expected if (lack := count - of_shards[url])]
    return (
        f"epoch {epoch + 1}: {missing:,} samples were not trained on, and {len(again):,} more than once; "
        f"missing of {', '.join(short[:5]) or 'no shard'}"
    )
