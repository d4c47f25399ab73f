"""What a user said of the inputs, as it is kept with a run, and back."""

from __future__ import annotations

from collections.abc import Sequence

from producer.selection import Selection
from sources.base import ReadOptions

CUT_UNIT_BYTES = 4_000_000
"""Of lines whose texts are cut: about a million tokens, so that a unit's chunks fit into memory however long texts
are."""


def recorded(options: ReadOptions, selection: Selection) -> tuple[tuple[str, str], ...]:
    """Options and selection as sorted pairs; what the user left out is left out."""
    read = {
        "id_column": options.id_column,
        "text_column": options.text_column,
        "unit_samples": str(options.unit_samples),
    }
    named = {
        "caption_keys": ";".join(options.caption_keys),
        "image_column": options.image_column,
        "image_keys": ";".join(options.image_keys),
        "input_format": options.kind,
        "metadata_columns": ",".join(options.metadata_columns),
    }
    read |= {name: value for name, value in named.items() if value}
    return tuple(sorted((*read.items(), *selection.recorded())))


def read_options(pairs: Sequence[tuple[str, str]], *, unit_bytes: int) -> ReadOptions:
    """The options that `recorded` wrote; `unit_bytes` follows from the run's model."""
    kept = dict(pairs)

    def parts(name: str, separator: str) -> tuple[str, ...]:
        return tuple(kept[name].split(separator)) if kept.get(name) else ()

    return ReadOptions(
        unit_samples=int(kept["unit_samples"]),
        unit_bytes=unit_bytes,
        text_column=kept.get("text_column", ""),
        id_column=kept.get("id_column", ""),
        image_column=kept.get("image_column", ""),
        metadata_columns=parts("metadata_columns", ","),
        image_keys=parts("image_keys", ";"),
        caption_keys=parts("caption_keys", ";"),
        kind=kept.get("input_format", ""),
    )
