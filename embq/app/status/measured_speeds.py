"""Speeds of models: those that a broker knows, and those of this machine, kept for later dry runs."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime

import redis
from redis.exceptions import RedisError

from embq.core import wire
from embq.core.errors import MalformedError
from embq.core.models import ModelConfig
from embq.core.queue.heartbeats import Device, Rate, measured_rates
from embq.core.run.run_info import RunInfo
from embq.core.settings import state_folder
from embq.core.storage import beneath
from embq.core.storage.durable import overwrite
from embq.core.storage.paths import Place
from embq.core.units import content_hash
from embq.core.wire import PathText, ShortText

FOLDER = "speeds"
MOST_BYTES = 65_536
TRIAL_ON_CPU, TRIAL_ON_GPU = 2_000, 50_000
"""Samples of a trial: usual models take seconds for them, and a speed is measured over 2 s or more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Measured speed of a model on the devices of a broker, or of this machine.

    Attributes:
        rates: measured speeds, one for each kind of device.
        workers: kind of device -> workers that are connected now; of this machine, its devices.
        measured_by: kind of device -> output and day of the run that measured it; a broker does not know them.
        trial_rows: samples for a trial on the devices, if they are those of this machine; else 0.
    """

    rates: tuple[Rate, ...]
    workers: dict[str, int]
    measured_by: Mapping[str, str] = field(default_factory=dict)
    trial_rows: int = 0

    @property
    def rows_per_s(self) -> float:
        """The speed of all connected workers whose speed was measured."""
        return sum(rate.rows_per_s * self.workers.get(rate.device, 0) for rate in self.rates)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """Speed of one device with all of its workers, and the run that measured it."""

    rate: Rate
    output: PathText
    day: ShortText


def keep(client: redis.Redis, info: RunInfo, output: Place, *, workers: int) -> None:
    """Keep what the broker of a run has measured; a run goes on if that fails.

    Args:
        workers: processes per device, each of which is as fast as the broker has it.
    """
    with suppress(OSError, RuntimeError, RedisError):  # RuntimeError: of Path.home(), if the user has none
        for speed in measured_rates(client, info.model):
            rate = Rate(device=speed.device, rows_per_s=speed.rows_per_s * workers, dims=speed.dims)
            measured = _Measured(rate=rate, output=str(output), day=datetime.now(UTC).date().isoformat())
            path = state_folder() / FOLDER / _name(info.model, speed.device)
            path.parent.mkdir(parents=True, exist_ok=True)
            overwrite(path, wire.write(measured).encode())


def cost_here(model: ModelConfig, devices: Sequence[Device]) -> Cost:
    """The measured speed of a model, in its precision, on devices of this machine."""
    counts, speeds = Counter(device.name for device in devices), {}
    for name in counts:
        with suppress(OSError, RuntimeError, MalformedError):
            data = beneath.read_bytes(state_folder() / FOLDER, _name(model, name), most_bytes=MOST_BYTES)
            speeds[name] = wire.read(_Measured, data, what="measured speed", most_bytes=MOST_BYTES)
    return Cost(
        rates=tuple(speed.rate for speed in speeds.values()),
        workers=dict(counts),
        measured_by={name: f"{speed.output} on {speed.day}" for name, speed in speeds.items()},
        trial_rows=TRIAL_ON_GPU if any(device.device.startswith("cuda") for device in devices) else TRIAL_ON_CPU,
    )


def _name(model: ModelConfig, device: str) -> str:
    """Name of a file. The host is part of it, because machines may share the folder."""
    return f"{content_hash([socket.gethostname(), model.queue_key, device])}.json"
