"""Devices that a user names, and the speed of a model on each."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping

from embq.app.planning.constants import REFERENCES, file_of
from embq.app.status.measured_speeds import Cost
from embq.core.cards import CARDS, names
from embq.core.errors import ModelError, UsageError
from embq.core.models import ModelConfig, ModelSpec
from embq.producer.model_args import open_clip_config, read_json
from embq.sources.reader_options import comma_list
from embq.worker.embedders.device.hardware import precisions_of
from embq.worker.embedders.lookup import named_folder

CPU = "CPU"
"""A CPU in the place of a card: no benchmark has its speed, only a run."""
NEAR = 0.01
"""Models whose work differs by less are taken as one."""


def cards_of(text: str) -> Counter[str]:
    """Card -> devices, of `[[MACHINESx]DEVICESx]CARD,...`; UsageError for others, and for a card in no table."""
    counts: Counter[str] = Counter()
    for part in comma_list(text):
        match = re.fullmatch(r"(?:(\d{1,6})x)?(?:(\d{1,6})x)?([A-Z]\w*)", part.replace(" ", ""), re.IGNORECASE)
        card, count = (match[3].upper(), int(match[1] or 1) * int(match[2] or 1)) if match else ("", 0)
        if not count or card not in (*CARDS, CPU):
            raise UsageError(
                f"--gpus {part!r} is not a number of known cards",
                next_step=f"write 8xH100, or 4x8xH100 for 4 machines; known are {', '.join(CARDS)} and cpu",
            )
        counts[card] += count
    return counts


def precisions(card: str) -> tuple[str, ...]:
    """Those that a card computes fast, best first."""
    return precisions_of(CARDS[card].capability if card in CARDS else None)


def refuses(card: str, precision: str) -> bool:
    """Whether workers on a card refuse models in a precision; fp16 of an old one is only slow."""
    return precision == "fp16" if card == CPU else precision not in (*precisions(card), "fp16")


def speed_of(card: str, config: ModelConfig, tokens: float, measured: Mapping[str, Cost]) -> tuple[float, str]:
    """Rows per second of a device that never waits, and the source: a run, or a benchmark of the H100, scaled.

    Args:
        tokens: of a text.
        measured: "the broker" or "this machine" -> its speeds of this config.

    Raises UsageError if nothing has it.
    """
    pattern = r", \d+ cores$" if card == CPU else names(card)
    for who, cost in measured.items():
        for rate in cost.rates:
            if re.search(pattern, rate.device, re.IGNORECASE):
                by = cost.measured_by.get(rate.device)
                return rate.rows_per_s, f"measured by {who}" + (f" in the run in {by}" if by else "")
    seconds, sources = 0.0, []
    for output in config.outputs:
        work = flop_of(ModelSpec.parse(output.spec), output.modality, tokens)
        if work is None or card not in CARDS:
            raise UsageError(
                f"the speed of {output.spec} on {card} is not known: no run measured it, and no config has its size",
                next_step="let `embq run --limit` measure it there, and plan on that machine or with its --broker",
            )
        near = min(
            (reference for reference in REFERENCES if reference.modality == output.modality),
            key=lambda reference: abs(math.log(reference.flop / work)),
        )
        ours, theirs = CARDS[card].fp32 if config.precision == "fp32" else CARDS[card].half, CARDS["H100"].half
        seconds += work / near.flop / near.rows_per_s * theirs / ours
        scales = [f"{near.flop / 1e9:.1f}/{work / 1e9:.1f} GFLOP"] * (abs(work / near.flop - 1) > NEAR)
        scales += [f"{ours:g}/{theirs} dense TFLOP/s in {config.precision}"] * (
            (card, config.precision) != ("H100", "bf16")
        )
        speed = f"{near.rows_per_s:,.0f}/s of {near.model} on an H100 in bf16 ({file_of(near.source)})"
        sources.append(" by ".join([f"assumed: {speed}" if scales else speed, *scales]))
    return 1 / seconds, "; ".join(sources)


def flop_of(spec: ModelSpec, modality: str, tokens: float) -> float | None:
    """FLOP of a sample, 2 m k n for a product of matrices, from the model's config; None if none here tells."""
    if spec.family == "open_clip":
        sizes = (open_clip_config(spec.name) or {}).get("vision_cfg" if modality == "image" else "text_cfg", {})
        layers, width, patch = (sizes.get(name) for name in ("layers", "width", "patch_size"))
        if not isinstance(layers, int) or not width or (modality == "image" and not patch):
            arch = (spec.name.partition("/")[0], modality)  # of timm, a ResNet, or without open_clip
            return next((row.flop for row in REFERENCES if (row.model, row.modality) == arch), None)
        patches = (sizes["image_size"] // patch) ** 2 if modality == "image" else 0
        positions = patches + 1 if patches else sizes.get("context_length", 77)
        stem = 2 * patches * 3 * (patch or 0) ** 2 * width
        return float(stem + _layers(layers, positions, width, 2 * width * sizes.get("mlp_ratio", 4.0)))
    try:
        folder = named_folder(spec) if spec.family in ("hf", "st", "minilm") and modality == "text" else None
    except (ModelError, ImportError):
        folder = None
    config = (read_json(folder / "config.json") if folder is not None else None) or {}
    names = ("num_hidden_layers n_layers n_layer", "hidden_size dim n_embd", "intermediate_size hidden_dim n_inner")
    layers, width, hidden = (next((config[name] for name in key.split() if config.get(name)), 0) for key in names)
    gated = "glu" in str(config.get("activation_function")) or config.get("hidden_act") == "silu"
    return _layers(layers, tokens, width, (3 if gated else 2) * hidden) if layers and width and hidden else None


def _layers(layers: int, tokens: float, width: int, feed_forward: float) -> float:
    """Of transformer layers: four projections, scores and weighted sums, and the feed-forward matrices."""
    return layers * 2 * tokens * (4 * width**2 + 2 * tokens * width + width * feed_forward)
