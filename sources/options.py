"""Reader options: what the user may say about inputs, and how a run records it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

CUT_UNIT_BYTES = 4_000_000
"""Of lines whose texts are cut: about a million tokens, so that a unit's chunks fit into memory however long texts
are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """User options that decide how inputs split into units and samples.

    Attributes:
        unit_samples: most samples of one unit, where the input is not sharded by itself.
        unit_bytes: bytes at which a unit of lines ends with the line, however few it has; 0 sets no bound.
        text_column: column or JSON field that holds the text; "" finds it.
        id_column: column or JSON field that holds the key; "" finds it or counts rows.
        image_column: column that holds the image, or its path or URL; "" finds it.
        metadata_columns: columns or JSON fields that become metadata; "*" among them takes all others; () does so
            where rows are lines (.jsonl, .csv), and takes none elsewhere.
        image_keys: extensions of what is an image in a shard or folder, in order of preference; () takes all known.
        caption_keys: extensions of what is a caption there, likewise; () takes txt.
        kind: kind of all inputs; "" tells it by their names.
    """

    unit_samples: int = 1000
    unit_bytes: int = 0
    text_column: str = ""
    id_column: str = ""
    image_column: str = ""
    metadata_columns: tuple[str, ...] = ()
    image_keys: tuple[str, ...] = ()
    caption_keys: tuple[str, ...] = ()
    kind: str = ""


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
