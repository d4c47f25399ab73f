"""Time, cost, limit and needs of a run on named devices, from measured constants."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from embq.app.planning.constants import NUMBER_BYTES, TEXT_TOKENS, files, value
from embq.core.formats.part import UNIT_FORMATS
from embq.core.models import ModelConfig
from embq.core.queue.result_stream import LIMIT_BYTES
from embq.core.service.progress_line import duration, size_text
from embq.core.settings import Settings
from embq.producer.feeder import TICK_S
from embq.worker.claim.heartbeat import REPORT_S
from embq.worker.stages.publish import PART_BYTES

Speeds: TypeAlias = Mapping[str, tuple[float, str]]
"""Card -> what `embq.app.planning.speeds.speed_of` gives."""
UNITS_IN_HAND = 3
"""Units of a device: the one that it computes, and two fetched ahead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Rows to embed, of `bytes_each` of input, `tokens` of text and `vector_bytes` of output; units of `unit_rows`."""

    config: ModelConfig
    rows: int
    bytes_each: float
    tokens: float
    unit_rows: float
    vector_bytes: float
    format: str

    @property
    def sent_bytes(self) -> float:
        """Of a row from its worker, without captions and metadata."""
        return self.vector_bytes + value("sent_bytes") - NUMBER_BYTES

    @property
    def cpu_s(self) -> float:
        """Of a core of the worker's machine for a row, to decode or tokenise."""
        image = self.bytes_each * value("image_us") / value("image_bytes") / 1e6
        text = self.tokens / TEXT_TOKENS * value("text_cores") / value("texts_per_s")
        return image * ("image" in self.config.modalities) + text * ("text" in self.config.modalities)

    @property
    def workers_write(self) -> bool:
        """Whether workers write the parts, and cost the writer time by the unit only."""
        return self.format in UNIT_FORMATS and self.unit_rows * self.vector_bytes >= PART_BYTES


def broker_cores(devices: int, units_per_s: float) -> float:
    """CPU of the broker: rounds of the producer, reports and beats of devices, units and the looks before claims."""
    ms = value("tick_ms") / TICK_S + devices * (value("report_ms") / REPORT_S + value("beat_ms") / Settings().beat_s)
    ms += units_per_s * (value("unit_ms") + value("looks_per_unit") * value("look_ms"))
    return ms / 1000 * value("simulated_share") / value("computed_share")


def plan_of(
    load: Load, cards: Mapping[str, int], speeds: Speeds, *, threads: int, gbps: float, prices: Mapping[str, float]
) -> dict[str, Any]:
    """The plan, in the shape of `embq plan --json`; null stands for what is not known.

    Args:
        cards: card -> devices, each with a speed.
        threads: cores of each device to decode and tokenise; 0 for as many as it needs.
        gbps: of the storage, in Gbit/s; 0 for no limit.
        prices: card -> price of a device for an hour; {} if there is no list.
    """
    prepared = threads / load.cpu_s if threads else math.inf
    fed = {card: min(speeds[card][0], prepared) for card in cards}
    most = sum(fed[card] * count for card, count in cards.items())
    limits = _limits(load, cards, sum(speeds[card][0] * cards[card] for card in cards), most, prepared, gbps)
    limit = min(limits, key=lambda name: limits[name])
    rate = limits[limit]
    devices = [
        {
            "device": card,
            "devices": count,
            "share": fed[card] * count / most,
            "rows_per_s": (own := fed[card] * rate / most),
            "rows_per_s_alone": speeds[card][0],
            "source": speeds[card][1],
            "cores": own * load.cpu_s,
            "read_bytes_per_s": own * load.bytes_each,
            "sent_bytes_per_s": own * load.sent_bytes,
            "cost": prices[card] * count * load.rows / rate / 3600 if prices else None,
        }
        for card, count in cards.items()
    ]
    return {
        "schema": 1,
        "precision": load.config.precision,
        "rows": load.rows,
        "rows_per_s": rate,
        "seconds": load.rows / rate,
        "cost": sum(device["cost"] for device in devices) if prices else None,
        "limit": limit,
        "sentence": _sentence(limit, limits, load, threads),
        "limits": {name: None if math.isinf(number) else number for name, number in limits.items()},
        "devices": devices,
        "needs": _needs(load, sum(cards.values()), rate, math.ceil(most / limits["writer"])),
    }


def _limits(
    load: Load, cards: Mapping[str, int], alone: float, most: float, prepared: float, gbps: float
) -> dict[str, float]:
    """Stage -> rows per second that it allows."""
    count = sum(cards.values())
    idle = broker_cores(count, 0)
    writer = load.unit_rows * 1000 / value(f"{load.format}_part_ms") if load.workers_write else 0
    return {
        "device": alone,
        "decoding" if "image" in load.config.modalities else "tokenising": most if most < alone else prepared * count,
        "storage": gbps * 1e9 / 8 / (load.bytes_each + load.sent_bytes) if gbps else math.inf,
        "broker": max(1e-9, 1 - idle) / (broker_cores(count, 1) - idle) * load.unit_rows,
        "writer": writer or value(f"{load.format}_rows_per_s"),
    }


def _needs(load: Load, count: int, rate: float, writers: int) -> dict[str, dict[str, Any]]:
    """Need -> value and source."""
    prepared_by = ("image_us", "image_bytes") * ("image" in load.config.modalities)
    prepared_by += ("text_cores",) * ("text" in load.config.modalities)
    held = count * (UNITS_IN_HAND * value("leased_unit_bytes") + value("worker_bytes"))
    waiting = load.rows / load.unit_rows * value("waiting_unit_bytes")
    stored = load.vector_bytes + value(f"{load.format}_bytes") - NUMBER_BYTES
    needs = {
        "broker_cores": (broker_cores(count, rate / load.unit_rows), files("report_ms")),
        "broker_bytes": (waiting + held + LIMIT_BYTES, files("waiting_unit_bytes", "leased_unit_bytes")),
        "storage_bytes_per_s": (rate * (load.bytes_each + load.sent_bytes), files("sent_bytes")),
        "disk_bytes": (load.rows * stored, files("parquet_bytes")),
        "writers": (writers, files("parquet_rows_per_s")),
        "worker_cores": (rate * load.cpu_s, files(*prepared_by)),
    }
    return {name: {"value": number, "source": source} for name, (number, source) in needs.items()}


def _sentence(limit: str, limits: Mapping[str, float], load: Load, threads: int) -> str:
    """The limit and what would end it, as `embq.app.status.bottleneck` has it for a run that is there."""
    times, next_name = limits["device"] / limits[limit], sorted(limits, key=lambda name: limits[name])[1]
    if limit == "device":
        return f"device: all else waits for it, up to {limits[next_name]:,.0f} rows/s, the limit of the {next_name}"
    larger = f"units of {math.ceil(PART_BYTES / load.vector_bytes):,} rows and more, or "
    remedies = {
        "storage": f"{limits['device'] * (load.bytes_each + load.sent_bytes) * 8 / 1e9:,.1f} Gbit/s",
        "broker": f"larger units, or {math.ceil(times)} runs with a broker each,",
        "writer": f"{'' if load.workers_write else larger}{math.ceil(times)} runs with a writer each",
    }
    remedy = remedies.get(limit, f"{math.ceil(threads * times):,} cores for each in place of {threads}")
    return f"{limit}: the devices wait {1 - 1 / times:.0%} of the time; {remedy} would keep them busy"


def lines(plan: Mapping[str, Any]) -> list[str]:
    """The plan for people."""
    rows = [("rows", f"{plan['rows']:,}, {plan['counted']}"), ("precision", plan["reason"])]
    rows.append(("time", f"{duration(plan['seconds'])} at {plan['rows_per_s']:,.0f} rows/s, without the start"))
    rows += [("cost", f"{plan['cost']:,.2f}")] if plan["cost"] is not None else []
    rows.append(("limit", plan["sentence"]))
    for device in plan["devices"]:
        share = f"{device['devices']:,} x {device['device']}: {device['share']:.1%} of the rows"
        rows.append(("devices", f"{share}, {device['rows_per_s_alone']:,.0f} rows/s each at most; {device['source']}"))
        each = ("cores", "read_bytes_per_s", "sent_bytes_per_s")
        rows.append(("  each", ", ".join(_shown(name, device[name]) for name in each)))
    rows += [("needs", f"{_shown(name, need['value'])}; {need['source']}") for name, need in plan["needs"].items()]
    rows += [("assumed", text) for text in plan["assumed"]]
    rows += [("instead", plan["instead"])] if plan["instead"] else []
    return [f"{name:<11}{text}" for name, text in rows]


def _shown(name: str, number: float) -> str:
    """A figure by the unit in its name."""
    words = name.removesuffix("_per_s").removesuffix("_bytes").replace("_", " ")
    if name.endswith("_bytes_per_s"):
        return f"{words} {size_text(number)}/s ({number * 8 / 1e9:,.2f} Gbit/s)"
    if name.endswith("_bytes"):
        return f"{words} {size_text(number)}"
    return f"{words} {number:,.0f}" if number >= 10 else f"{words} {number:.2g}"
