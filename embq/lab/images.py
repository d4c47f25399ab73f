"""`embq bench images`: the rate of each stage alone and of all together, the bottleneck, and the cores needed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from embq.app.status.bottleneck import Bottleneck, bottleneck_now
from embq.app.status.display import stages_line
from embq.core.benchmark_record import table
from embq.core.errors import InputError
from embq.core.models import ModelConfig
from embq.core.process.limits import cores
from embq.core.service.progress_line import size_text
from embq.core.settings import Settings, change_environment
from embq.core.units import Sample, Unit
from embq.lab import image_stages as stages
from embq.lab.image_stages import Poll, Rate, Tried
from embq.lab.outcomes import plural
from embq.producer.model_args import asked_models, config_of
from embq.producer.plan import plan
from embq.sources.reader_options import ReadOptions
from embq.worker.embedders.base import Embedder, Prepared
from embq.worker.embedders.device.hardware import device_name
from embq.worker.embedders.device.tuning import tune
from embq.worker.embedders.device.warm_up import warm_up
from embq.worker.embedders.registry import load
from embq.worker.supervisor.devices import isolated_device

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
    read_options: ReadOptions
    samples: int
    seconds: float
    threads: int
    batch_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageBenchResult:
    """The result of the measurement.

    Attributes:
        rates: of "read", "decode_one_thread", "decode" with `threads`, "device" alone, and all "together".
        batch_size: of the passes of the device alone.
        limit: the bottleneck of all stages together, with the cores that would keep the device busy.
    """

    options: ImageBenchOptions
    device_name: str
    tried: Tried
    threads: int
    batch_size: int
    rates: dict[str, Rate]
    limit: Bottleneck

    @property
    def cores_needed(self) -> int:
        """Cores that decode as fast as the device embeds, by the measured CPU time."""
        return max(1, math.ceil(self.rates["device"].per_s / (self.rates["decode"].per_core * USED)))

    @property
    def of_slowest(self) -> float:
        """The rate of all together as a share of that of the slowest stage alone, its upper bound."""
        return self.rates["together"].per_s / min(self.rates[name].per_s for name in ("read", "decode", "device"))

    def describe(self) -> dict[str, Any]:
        """JSON-ready."""
        read = self.rates["read"]
        return {
            "inputs": list(self.options.inputs),
            **{name: getattr(self.options, name) for name in ("model", "precision", "decode", "device")},
            "device_name": self.device_name,
            "samples": read.samples,
            "bytes_per_sample": round(read.bytes / read.samples),
            "tried": len(self.tried.answers),
            "failures": self.tried.failures,
            "unreadable_units": dict(self.tried.sources),
            "threads": self.threads,
            "batch_size": self.batch_size,
            **{f"{name}_per_s": round(rate.per_s, 1) for name, rate in self.rates.items()},
            "read_mb_per_s": round(read.bytes / read.seconds / 1e6, 1),
            "decode_per_core_s": round(self.rates["decode"].per_core, 1),
            "of_slowest": round(self.of_slowest, 3),
            "cores_needed": self.cores_needed,
            "limit": self.limit.name,
            "limit_detail": self.limit.describe(),
        }

    def lines(self) -> list[str]:
        """The report: a table and conclusions."""
        read, single, decode, device, together = self.rates.values()
        rows = [
            ("read", read, f"{size_text(read.bytes / read.seconds)}/s, {size_text(read.bytes / read.samples)} each"),
            ("decode, 1 thread", single, f"{single.per_core:,.0f} in a second of a core"),
            (f"decode, {plural(self.threads, 'thread')}", decode, f"{decode.per_core:,.0f} in a second of a core"),
            ("device alone", device, f"samples that are prepared already, {self.batch_size} in a pass"),
            ("all together", together, f"{self.of_slowest:.0%} of the slowest of these alone"),
        ]
        width = max(len(note) for *_, note in rows)
        cells = [(name, f"{rate.per_s:,.1f}", note.ljust(width)) for name, rate, note in rows]
        failed = ", ".join(f"{code} {count:,}" for code, count in self.tried.failures.items())
        sources = ", ".join(f"{code} {count:,}" for code, count in self.tried.sources.items())
        return [
            *(line.rstrip() for line in table(("", "samples/s", " " * width), cells).splitlines()),
            f"limited by {self.limit.sentence()}",
            f"stages together: {stages_line(self.limit)}",
            f"cores that decode as much as the device embeds ({self.options.device}, {self.device_name}), "
            f"with a fifth to spare: {self.cores_needed:,}",
            f"failures: {failed or 'none'} of {len(self.tried.answers):,} samples"
            + (f"; units that cannot be read: {sources}" if sources else ""),
        ]


def measure(options: ImageBenchOptions, say: Callable[[str], None], poll: Poll) -> ImageBenchResult:
    """Measure each stage alone and then all together.

    Raises InputError if the inputs hold no image that can be decoded, and what planning and loading raise.
    """
    config, units = _planned(options)
    threads, seconds = options.threads or cores(), options.seconds
    say(f"loading {config.spec} on {options.device}")
    in_torch, environment = isolated_device(options.device, Settings.from_environment().cuda_visible)
    change_environment(environment)
    embedder = load(config, in_torch)
    if options.batch_size:
        embedder.batch_size = embedder.window = options.batch_size
    warm_up(embedder, config.modalities)
    tune(embedder, config, device=in_torch, batch_size=options.batch_size)
    tried = Tried()
    rates: dict[str, Rate] = {}
    say(f"reading up to {options.samples:,} samples from {len(units):,} places of the inputs")
    samples, rates["read"] = stages.read_some(units, options.samples, seconds, tried, poll)
    ready = _ready(options, embedder, samples, threads, tried, poll)
    say(f"decoding {len(samples):,} samples with 1 thread")
    rates["decode_one_thread"] = rates["decode"] = stages.decode(embedder, samples, 1, seconds, tried, poll)
    say(f"decoding with {threads} threads")
    if threads > 1:
        rates["decode"] = stages.decode(embedder, samples, threads, seconds, tried, poll)
    say("the device alone")
    rates["device"], batch_size = stages.device(embedder, ready, seconds, poll)
    del ready, samples
    embedder.batch_size = min(batch_size, embedder.batch_size)
    say("all together")
    rates["together"], report = stages.together(embedder, config, units, threads, 2 * seconds, poll)
    result = ImageBenchResult(
        options=options,
        device_name=device_name(in_torch),
        tried=tried,
        threads=threads,
        batch_size=batch_size,
        rates=rates,
        limit=bottleneck_now([{"held": 1, "rows_per_s": rates["together"].per_s, **report}]),
    )
    if result.limit.cores_needed is None:
        return result
    # The device alone was measured with full passes, which is more accurate than beside the decoding.
    return replace(result, limit=replace(result.limit, cores_needed=result.cores_needed, cores_exact=True))


def _ready(
    options: ImageBenchOptions, embedder: Embedder, samples: Sequence[Sample], threads: int, tried: Tried, poll: Poll
) -> list[Prepared]:
    """Some prepared samples; InputError without any."""
    if not samples:
        raise InputError(f"{options.inputs[0]}: no samples to measure with", code="empty_input")
    if ready := stages.some_prepared(embedder, samples, BATCHES_READY * embedder.batch_size, poll):
        return ready
    stages.decode(embedder, samples, threads, 0.0, tried, poll)
    codes = ", ".join(tried.failures)
    raise InputError(
        f"{options.inputs[0]}: none of {len(samples):,} samples can be decoded ({codes})",
        next_step="`embq failures` of a run says what each is; is it the right column or extension?",
    )


def _planned(options: ImageBenchOptions) -> tuple[ModelConfig, list[Unit]]:
    """The model, and units from all over the inputs."""
    planned = plan(options.inputs, replace(options.read_options, unit_samples=UNIT_SAMPLES), ("image",))
    config = config_of(
        asked_models((options.model,)),
        modalities=planned.modalities,
        precision=options.precision,
        chunking=None,
        decode=options.decode,
    )
    units = stages.spread(planned.units)
    if not units:
        raise InputError(f"{options.inputs[0]}: nothing to embed", code="empty_input")
    return config, units
