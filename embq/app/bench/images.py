"""`embq bench images`: the rate of each stage alone and of all together, the bottleneck, and the cores needed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from embq.app.bench import image_stages as stages
from embq.app.bench.image_stages import Poll, Rate, Tried, together
from embq.app.status.bottleneck import Bottleneck, bottleneck_now
from embq.app.status.display import stages_line
from embq.core.benchmark_record import table
from embq.core.errors import InputError
from embq.core.models import ModelConfig
from embq.core.process.limits import cores
from embq.core.service.progress_line import size_text
from embq.core.settings import Settings, change_environment
from embq.core.units import Sample
from embq.producer.model_args import asked_models, config_of
from embq.producer.plan import plan
from embq.sources.reader_options import ReadOptions
from embq.worker.embedders.base import Embedder, Prepared
from embq.worker.embedders.device.hardware import device_name
from embq.worker.embedders.device.tuning import tune
from embq.worker.embedders.device.warm_up import warm_up
from embq.worker.embedders.registry import load
from embq.worker.supervisor.devices import alone

UNIT_SAMPLES = 100
"""Unit size for folders and tables, small so that samples come from many places."""
USED = 0.8
"""Fraction of a core's time for decoding; the rest goes to contention and reading."""
BATCHES_READY = 2
"""Batches of prepared samples for measuring the device alone; more would only take memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageBenchOptions:
    """Options of the measurement.

    Attributes:
        samples: most samples of the inputs.
        seconds: approximate duration for each stage; all together twice as long.
        threads: decoding threads; 0 for the number of cores.
        batch_size: 0 for that of the embedder.
    """

    inputs: tuple[str, ...]
    model: str
    precision: str
    decode: str
    device: str
    options: ReadOptions
    samples: int
    seconds: float
    threads: int
    batch_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageBenchResult:
    """The result of the measurement.

    Attributes:
        one, all: decoding with one thread and with `threads`.
        batch_size: of the passes of the device alone.
        limit: the bottleneck of all stages together, with the cores that would keep the device busy.
    """

    asked: ImageBenchOptions
    device_name: str
    samples: int
    tried: Tried
    threads: int
    batch_size: int
    read: Rate
    one: Rate
    all: Rate
    device: Rate
    together: Rate
    limit: Bottleneck

    @property
    def cores_needed(self) -> int:
        """Cores that decode as fast as the device embeds, by the measured CPU time."""
        return max(1, math.ceil(self.device.per_s / (self.all.per_core * USED)))

    @property
    def slowest(self) -> float:
        """Samples per second of the slowest stage alone: the upper bound of all together."""
        return min(self.read.per_s, self.all.per_s, self.device.per_s)

    def describe(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "inputs": list(self.asked.inputs),
            "model": self.asked.model,
            "precision": self.asked.precision,
            "decode": self.asked.decode,
            "device": self.asked.device,
            "device_name": self.device_name,
            "samples": self.samples,
            "bytes_per_sample": round(self.read.bytes / self.samples),
            "tried": len(self.tried.answers),
            "failures": self.tried.failures,
            "unreadable_units": dict(self.tried.sources),
            "threads": self.threads,
            "batch_size": self.batch_size,
            "read_per_s": round(self.read.per_s, 1),
            "read_mb_per_s": round(self.read.bytes / self.read.seconds / 1e6, 1),
            "decode_one_thread_per_s": round(self.one.per_s, 1),
            "decode_per_s": round(self.all.per_s, 1),
            "decode_per_core_s": round(self.all.per_core, 1),
            "device_per_s": round(self.device.per_s, 1),
            "together_per_s": round(self.together.per_s, 1),
            "of_slowest": round(self.together.per_s / self.slowest, 3),
            "cores_needed": self.cores_needed,
            "limit": self.limit.name,
            "limit_detail": self.limit.describe(),
        }

    def lines(self) -> list[str]:
        """The report: a table and conclusions."""
        each = self.read.bytes / self.samples
        many = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        rows = [
            ("read", self.read, f"{size_text(self.read.bytes / self.read.seconds)}/s, {size_text(each)} each"),
            ("decode, 1 thread", self.one, f"{self.one.per_core:,.0f} in a second of a core"),
            (f"decode, {many}", self.all, f"{self.all.per_core:,.0f} in a second of a core"),
            ("device alone", self.device, f"samples that are prepared already, {self.batch_size} in a pass"),
            ("all together", self.together, f"{self.together.per_s / self.slowest:.0%} of the slowest of these alone"),
        ]
        cells = [(name, f"{rate.per_s:,.1f}", what) for name, rate, what in rows]
        width = max(len(what) for *_, what in cells)
        shown = table(("", "samples/s", "".ljust(width)), [(n, rate, what.ljust(width)) for n, rate, what in cells])
        failed = ", ".join(f"{code} {count:,}" for code, count in self.tried.failures.items())
        sources = ", ".join(f"{code} {count:,}" for code, count in self.tried.sources.items())
        return [
            *(line.rstrip() for line in shown.splitlines()),
            f"limited by {self.limit.sentence()}",
            f"stages together: {stages_line(self.limit)}",
            f"cores that decode as much as the device embeds ({self.asked.device}, {self.device_name}), "
            f"with a fifth to spare: {self.cores_needed:,}",
            f"failures: {failed or 'none'} of {len(self.tried.answers):,} samples"
            + (f"; units that cannot be read: {sources}" if sources else ""),
        ]


def measure(asked: ImageBenchOptions, say: Callable[[str], None], poll: Poll) -> ImageBenchResult:
    """Measure each stage alone and then all together.

    Raises InputError where the inputs hold no image that can be decoded, and what planning and loading raise.
    """
    config, units = _planned(asked)
    threads = asked.threads or cores()
    say(f"loading {config.spec} on {asked.device}")
    in_torch, environment = alone(asked.device, Settings.from_environment().cuda_visible)
    change_environment(environment)
    embedder = load(config, in_torch)
    if asked.batch_size:
        embedder.batch_size = embedder.window = asked.batch_size
    warm_up(embedder, config.modalities)
    tune(embedder, config, device=in_torch, batch_size=asked.batch_size)
    tried = Tried()
    say(f"reading up to {asked.samples:,} samples from {len(units):,} places of the inputs")
    samples, read = stages.read_some(units, asked.samples, asked.seconds, tried, poll)
    ready = _ready(asked, embedder, samples, threads, tried, poll)
    say(f"decoding {len(samples):,} samples with 1 thread")
    one = stages.decode(embedder, samples, 1, asked.seconds, tried, poll)
    say(f"decoding with {threads} threads")
    all_ = one if threads == 1 else stages.decode(embedder, samples, threads, asked.seconds, tried, poll)
    say("the device alone")
    device, batch_size = stages.device(embedder, ready, asked.seconds, poll)
    del ready, samples
    embedder.batch_size = min(batch_size, embedder.batch_size)
    say("all together")
    both, report = together(embedder, config, units, threads, 2 * asked.seconds, poll)
    found = ImageBenchResult(
        asked=asked,
        device_name=device_name(in_torch),
        samples=read.samples,
        tried=tried,
        threads=threads,
        batch_size=batch_size,
        read=read,
        one=one,
        all=all_,
        device=device,
        together=both,
        limit=bottleneck_now([{"held": 1, "rows_per_s": both.per_s, **report}]),
    )
    if found.limit.cores_needed is None:
        return found
    # The device alone was measured with full passes, which is more accurate than beside the decoding.
    return replace(found, limit=replace(found.limit, cores_needed=found.cores_needed, cores_exact=True))


def _ready(
    asked: ImageBenchOptions, embedder: Embedder, samples: Sequence[Sample], threads: int, tried: Tried, poll: Poll
) -> list[Prepared]:
    """Some prepared samples; InputError where there are none."""
    if not samples:
        raise InputError(f"{asked.inputs[0]}: no samples to measure with", code="empty_input")
    if ready := stages.some_prepared(embedder, samples, BATCHES_READY * embedder.batch_size, poll):
        return ready
    stages.decode(embedder, samples, threads, 0.0, tried, poll)
    codes = ", ".join(tried.failures)
    raise InputError(
        f"{asked.inputs[0]}: none of {len(samples):,} samples can be decoded ({codes})",
        next_step="`embq failures` of a run says what each is; is it the right column or extension?",
    )


def _planned(asked: ImageBenchOptions) -> tuple[ModelConfig, list[Any]]:
    """The model, and units from all over the inputs."""
    options = replace(asked.options, unit_samples=UNIT_SAMPLES)
    planned = plan(asked.inputs, options, ("image",))
    config = config_of(
        asked_models((asked.model,)),
        modalities=planned.modalities,
        precision=asked.precision,
        chunking=None,
        decode=asked.decode,
    )
    units = stages.spread(planned.units)
    if not units:
        raise InputError(f"{asked.inputs[0]}: nothing to embed", code="empty_input")
    return config, units
