"""The plan of a request: its rows, its precision, and the speeds that this machine or a broker has measured."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import redis

from embq.app.cli.precision import resolve_precision
from embq.app.local.session import own_devices
from embq.app.planning.constants import REFERENCES
from embq.app.planning.fleet_plan import Load, plan_of
from embq.app.planning.speeds import CPU, precisions, refuses, speed_of
from embq.app.status.measured_speeds import Cost, cost_here
from embq.core.errors import InputError, UsageError
from embq.core.queue.heartbeats import Device, measured_rates
from embq.core.service.progress_line import duration, size_text
from embq.producer.enqueue import Request
from embq.producer.estimate import CHARS_PER_TOKEN, NUMBER_BITS, estimate, known_dims
from embq.producer.model_args import PRECISIONS, asked_models, config_of

Named: TypeAlias = tuple[str, float, float] | None
"""Modality, rows, and bytes of each, in place of inputs."""
MOST_TOKENS = 512
"""Most that BERT and its kind read of a text."""


def prices_of(path: str | None, cards: Mapping[str, int]) -> dict[str, float]:
    """Card -> price of an hour; {} if no file is named. UsageError for a file that has not all of them."""
    try:
        listed = tomllib.loads(Path(path).read_text(encoding="utf-8")) if path else {}
        prices = {card.upper(): float(price) for card, price in listed.items()}
        return {card: prices[card] for card in cards if path}
    except (OSError, ValueError, TypeError, KeyError) as error:
        lines = ", ".join(f"{card} = 2.5" for card in cards)
        raise UsageError(f"--prices {path} has no price of each card: {error}", next_step=f"write {lines}") from error


def planned(
    request: Request, cards: Mapping[str, int], client: redis.Redis | None, *, named: Named, **settings: Any
) -> dict[str, Any]:
    """The plan in the precision of the request, and the sentence on a better one that some of the cards lack.

    Args:
        settings: those of `plan_of`.

    Raises what planning the inputs does, and UsageError if a speed is not known or no card is left.
    """
    devices = [
        Device(device=card, name=card, state="idle", worker="", precisions=precisions(card))
        for card, count in cards.items()
        for _ in range(count)
    ]
    request, reason = resolve_precision(request, precision_at=lambda _output: "", devices=lambda: devices)
    load, counted = _load(request, named)

    def of(precision: str, taken: Mapping[str, int]) -> dict[str, Any]:
        config = replace(load.config, precision=precision)
        rates = () if client is None else tuple(measured_rates(client, config))
        here = own_devices("auto") + (own_devices("cpu") if CPU in taken else [])
        measured = {"the broker": Cost(rates=rates, workers={}), "this machine": cost_here(config, here)}
        speeds = {card: speed_of(card, config, load.tokens, measured) for card in taken}
        return plan_of(replace(load, config=config), taken, speeds, **settings)

    able = {card: count for card, count in cards.items() if not refuses(card, request.precision)}
    if not able:
        raise UsageError(f"none of --gpus computes in {request.precision}", next_step="leave out --precision")
    plan, instead = of(request.precision, able), ""
    rank = PRECISIONS.index(request.precision) if request.precision in PRECISIONS else 0
    better = next((name for name in PRECISIONS[:rank] if any(name in precisions(card) for card in cards)), "")
    if better:
        fast = {card: count for card, count in cards.items() if better in precisions(card)}
        other, names = of(better, fast), ", ".join(f"{count:,} x {card}" for card, count in fast.items())
        texts = [
            duration(row["seconds"]) + ("" if row["cost"] is None else f", {row['cost']:,.2f}") for row in (other, plan)
        ]
        instead = f"--precision {better} on {names} alone: {texts[0]}; {request.precision} on all: {texts[1]}"
    assumed = [f"units of {load.unit_rows:,.0f} rows", "workers that see the output folder"]
    assumed += [f"{card} is left out: it refuses {request.precision}" for card in cards if card not in able]
    if "text" in load.config.modalities:
        assumed.append(f"{load.tokens:.0f} tokens a text: {CHARS_PER_TOKEN} bytes each, at most {MOST_TOKENS}")
    reason = reason.removeprefix("precision ") or f"{request.precision}, as --precision has it"
    return plan | {"counted": counted, "reason": reason, "assumed": assumed, "instead": instead}


def _load(request: Request, named: Named) -> tuple[Load, str]:
    """The rows of a request, and how they were counted: by planning the inputs, or by the user."""
    if named is not None:
        modality, rows, bytes_each = named
        config = config_of(
            asked_models(request.models),
            modalities=request.modalities or (modality,),
            precision=request.precision,
            chunking=request.chunking,
            decode=request.decode,
        )
        unit_rows, counted = float(request.options.unit_samples), f"as named, of {size_text(bytes_each)} each"
    else:
        estimated = estimate(request)
        if not estimated.rows:
            raise InputError(
                "the rows of the inputs are not known: no unit could be read", next_step="name --image-count"
            )
        config, rows, unit_rows, bytes_each = (
            estimated.config,
            estimated.rows,
            estimated.rows / estimated.units,
            estimated.bytes / estimated.rows,
        )
        counted = f"{'counted' if estimated.exact else 'estimated'} in {estimated.units:,} units"
    dims = known_dims(config, request.rows)
    if dims is None:  # open_clip is not here, or the model is of the hub
        dims_of = {reference.model: reference.dims for reference in REFERENCES}
        specs = [spec.spec.partition(":")[2].partition("/")[0] for spec in config.outputs]
        dims = sum(request.rows.kept_dim(dims_of.get(spec, 768)) for spec in specs)
    return Load(
        config=config,
        rows=round(rows),
        bytes_each=bytes_each,
        tokens=request.chunking.tokens if request.chunking else min(MOST_TOKENS, bytes_each / CHARS_PER_TOKEN),
        unit_rows=unit_rows,
        vector_bytes=dims * NUMBER_BITS[request.rows.dtype] / 8,
        format=request.format,
    ), counted
