"""`--dry-run` of `embq run` and `embq enqueue`: what a request would make and cost, as a table or as JSON."""

from __future__ import annotations

from typing import Any

import redis

from embq.app.status.measured_speeds import Cost
from embq.core.queue.heartbeats import live_workers, measured_rates
from embq.core.service.progress_line import duration, size_text
from embq.producer.estimate import Estimate, known_dims


def cost_of(estimate: Estimate, client: redis.Redis) -> Cost:
    """The measured speed of the model of a request."""
    workers: dict[str, int] = {}
    for worker in live_workers(client):
        name = str(worker.get("device_name", ""))
        workers[name] = workers.get(name, 0) + 1
    return Cost(rates=tuple(measured_rates(client, estimate.config)), workers=workers)


def to_json(estimate: Estimate, cost: Cost | None) -> dict[str, Any]:
    """The shape of `embq enqueue --dry-run --json`; null stands for what is not known."""
    dims = _dims(estimate, cost)
    rows = estimate.rows
    return {
        "schema": 1,
        "dry_run": True,
        "run": estimate.run or None,
        "units_there": estimate.existing_units,
        "precision": estimate.config.precision,
        "units": estimate.units,
        "kinds": estimate.kinds,
        "bytes": estimate.bytes,
        "rows": rows,
        "rows_exact": estimate.exact,
        "rows_from_units": estimate.looked_at,
        "columns": [{"name": column.name, "type": column.type} for column in estimate.columns],
        "documents": estimate.documents,
        "dims": dims,
        "vector_bytes": estimate.vector_bytes(dims) if dims is not None else {},
        "devices": None
        if cost is None
        else [
            {
                "device": rate.device,
                "rows_per_s": rate.rows_per_s,
                "device_hours": None if rows is None else _hours(rows, rate.rows_per_s),
                "workers": cost.workers.get(rate.device, 0),
                "measured_by": cost.measured_by.get(rate.device),
            }
            for rate in cost.rates
        ],
        "total_hours": None if cost is None or rows is None or not cost.rows_per_s else _hours(rows, cost.rows_per_s),
        "listing": estimate.listing or None,
        "warnings": list(estimate.warnings),
    }


def lines(estimate: Estimate, cost: Cost | None) -> list[str]:
    """The same for people."""
    report = to_json(estimate, cost)
    kinds = ", ".join(f"{count:,} of kind {kind}" for kind, count in sorted(estimate.kinds.items())) or "none"
    added = f", to be added to {estimate.existing_units:,} of run {estimate.run}" if estimate.run else ""
    listing = f"; {estimate.listing}" if estimate.listing else ""
    rows = [("units", kinds + added), ("input", size_text(estimate.bytes) + listing)]
    if estimate.rows is None:
        rows.append(("rows", "not known: only reading tells, and none of the units that were tried can be read"))
    elif estimate.exact:
        rows.append(("rows", f"{estimate.rows:,}, less what fails"))
    elif estimate.config.chunking is not None:
        texts = f"{estimate.documents:,}" if estimate.documents is not None else "not counted"
        rows.append(("texts", f"{texts}, cut into chunks: {estimate.config.chunking}"))
        rows.append(("rows", f"about {estimate.rows:,} chunks, by the lengths of texts in {estimate.looked_at} units"))
    else:
        rows.append(("rows", f"about {estimate.rows:,}, by bytes from {estimate.looked_at} units that were read"))
    if estimate.columns:
        rows.append(("metadata", ", ".join(f"{column.name} {column.type}" for column in estimate.columns)))
    if report["dims"] is None:
        rows.append(("vectors", "not known: the model has not run on this broker, and is not looked into"))
    elif report["vector_bytes"]:
        sizes = ", ".join(f"{size_text(size)} as {dtype}" for dtype, size in report["vector_bytes"].items())
        rows.append(("vectors", f"{report['dims']:,} numbers a row: {sizes}; keys, captions and metadata come on top"))
    rows += _device_hours(estimate, cost, report)
    return [f"{name:<14}{text}" for name, text in rows]


def _device_hours(estimate: Estimate, cost: Cost | None, report: dict[str, Any]) -> list[tuple[str, str]]:
    """(name, text) of each line about time; `report` as `to_json` makes it."""
    if cost is None:
        return [("device hours", "not known: no broker is configured (--broker)")]
    if not cost.rates:
        why = "not known: this model has not run on this broker yet"
        return [("device hours", _not_measured(estimate, cost) if cost.trial_rows else why)]
    rows = []
    for device in report["devices"]:
        hours = "not known" if device["device_hours"] is None else f"{device['device_hours']:,.3f}"
        speed = f"{hours} on {device['device']} at {device['rows_per_s']:,.1f} rows/s measured"
        by = f" by the run in {device['measured_by']}" if device["measured_by"] else ""
        workers = f"{device['workers']:,} {'here' if by else 'connected now'}"
        rows.append(("device hours", f"{speed}{by}; {workers}"))
    total = report["total_hours"]
    if total is None:
        text = "no such device is connected now" if estimate.rows is not None else "not known, as the rows are not"
    elif cost.trial_rows:
        text = f"about {duration(total * 3600)} on this machine for samples like those of that run, and the start"
    else:
        text = f"{total:,.3f} hours with what is connected now"
    return [*rows, ("total", text)]


def _not_measured(estimate: Estimate, cost: Cost) -> str:
    """The sentence if no run has measured a speed, with a command that does."""
    return (
        f"not known: no run on this machine has measured {estimate.config.spec} in {estimate.config.precision} yet. "
        f"To measure it, give this command with `--limit {cost.trial_rows} -o TRIAL` in place of --dry-run, then "
        "this one again"
    )


def _dims(estimate: Estimate, cost: Cost | None) -> int | None:
    dims = known_dims(estimate.config, estimate.stored)
    if dims is None and cost is not None and cost.rates:
        return estimate.stored_dims(cost.rates[0].dims)
    return dims


def _hours(rows: int, rows_per_s: float) -> float:
    return round(rows / rows_per_s / 3600, 4)
