"""Parser of index keys (faiss factory strings); refuses those that cannot be built in parts and merged."""

from __future__ import annotations

import re
from dataclasses import dataclass

from embq.core.errors import UsageError
from embq.index.plan.codec_choices import lists_for
from embq.index.plan.codecs import TRANSFORM, Codec, codec

_MAX_KEY = 200
_LISTS = re.compile(r"IVF(\d+)(?:_(HNSW\d*)|\((?:PCA([1-9]\d*),)?Flat\))?")
_OUTSIDE_PARENTHESES = re.compile(r",(?![^(]*\))")


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexKey:
    """A factory string, understood.

    Attributes:
        codec: how vectors are kept, with the transform before them.
        nlist: number of lists.
        coarse: an index over the centroids for searching: "" or "HNSW32".
        note: what is done differently from what was written, or "".
    """

    codec: Codec
    nlist: int
    coarse: str = ""
    note: str = ""


def parse_key(text: str, *, dim: int, rows: int) -> IndexKey:
    """The parts of a factory string for `rows` vectors of `dim` dimensions.

    Raises:
        UsageError: faiss has no such index, or it is one that cannot be built in parts and merged; the next step names
            the nearest key that can.
    """
    text = text.replace(" ", "")
    if len(text) > _MAX_KEY:  # patterns below look ahead to its end
        raise UsageError(f"--index-key {text[:60]}... has {len(text):,} characters", next_step="Write IVF4096,SQ8.")
    suggested = lists_for(rows)
    _refuse_wrapped(text)
    parts = _parts(text, suggested)
    _refuse_unmergeable(parts, suggested)
    parsed = _codec_of(parts, dim, suggested)
    _try_faiss(text, parsed, dim)
    if parts.nlist is None:
        return IndexKey(codec=parsed, nlist=1, note="Flat is built as IVF1,Flat: one list, every vector compared")
    return IndexKey(codec=parsed, nlist=parts.nlist, coarse=parts.coarse)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """A factory string, cut at its commas.

    Attributes:
        text: the whole.
        transforms: what is before the lists, or all but the last if there are no lists.
        lists: as they are written, or those suggested if there are none.
        nlist: number of lists; None if there are none.
        coarse: an index over the centroids: "" or "HNSW32".
        list_dim: dimensions of the centroids; None for those of the codes.
        last: the codec.
    """

    text: str
    transforms: tuple[str, ...]
    lists: str
    nlist: int | None = None
    coarse: str = ""
    list_dim: int | None = None
    last: str

    def with_codec(self, last: str) -> str:
        """The key with lists and this codec."""
        return ",".join([*self.transforms, self.lists, last])


def _parts(text: str, suggested: int) -> _Parts:
    *prefix, last = _OUTSIDE_PARENTHESES.split(text)
    match = _LISTS.fullmatch(prefix[-1]) if prefix else None
    if match is None:
        return _Parts(text=text, transforms=tuple(prefix), lists=f"IVF{suggested}", last=last)
    if int(match[1]) < 1:
        raise UsageError(f"--index-key {text} has no lists", next_step=f"Write IVF{suggested} instead of {prefix[-1]}.")
    return _Parts(
        text=text,
        transforms=tuple(prefix[:-1]),
        lists=prefix[-1],
        nlist=int(match[1]),
        coarse=match[2] or "",
        list_dim=int(match[3]) if match[3] else None,
        last=last,
    )


def _refuse_wrapped(text: str) -> None:
    """UsageError if nothing is written, or an index is wrapped into another."""
    if not text:
        raise UsageError("--index-key is empty", next_step="Leave it out, and a key is chosen by the memory allowed.")
    if match := re.search(r",?(?:Refine\(.*\)|RFlat)$", text):
        raise _unusable(
            text,
            "an index with a refinement inside cannot be merged",
            f"--index-key {text[: match.start()]} --refine fp16: the same rows, kept on disk beside the index",
        )
    if text.startswith(("IDMap", "IDMap2")):
        rest = text.partition(",")[2]
        raise _unusable(text, "rows carry their ids in the lists anyway", f"--index-key {rest or 'Flat'}")


def _refuse_unmergeable(parts: _Parts, suggested: int) -> None:
    """UsageError if a part cannot be built in pieces and merged, or is none."""
    text, last = parts.text, parts.last
    if re.match(r"HNSW|NSG|NNDescent|LSH|IMI", last) or any(part.startswith("IMI") for part in parts.transforms):
        prefix = "".join(f"{part}," for part in parts.transforms if TRANSFORM.fullmatch(part))
        raise _unusable(
            text,
            "its lists cannot be merged" if "IMI" in text else "a graph cannot be built in parts and merged",
            f"--index-key {prefix}IVF{suggested},SQ8",
        )
    if unknown := [part for part in parts.transforms if not TRANSFORM.fullmatch(part)]:
        raise _unknown(text, unknown[0], suggested)
    if match := re.fullmatch(r"(PQ\d+x4|RaBitQ)fs[r]?(?:_\d+|\d)?", last):
        raise _unusable(
            text,
            "packed lists cannot be merged",
            f"--index-key {parts.with_codec(match[1])}: its lists are packed for fast scanning when they are loaded",
        )


def _codec_of(parts: _Parts, dim: int, suggested: int) -> Codec:
    """The codec with the transforms before it; UsageError if there is none such, or if it needs lists."""
    name = ",".join([*parts.transforms, parts.last])
    try:
        parsed = codec(name, dim, list_dim=parts.list_dim)
    except ValueError as error:
        if parts.nlist is not None and "cannot be cut" in str(error):
            nearest = _pieces_near(parts.last, dim)
            raise UsageError(
                f"--index-key {parts.text} cannot be built: {error}",
                next_step=f"Write {nearest} instead, or put OPQ before it, which changes the dimensions.",
            ) from None
        raise _unknown(parts.text, parts.last, suggested) from None
    if parts.nlist is None and name != "Flat":
        raise _unusable(parts.text, "it has no lists to build in parts", f"--index-key {parts.with_codec(parts.last)}")
    return parsed


def _try_faiss(text: str, parsed: Codec, dim: int) -> None:
    """Lets faiss read the key, with two lists: only what it makes of it is sure."""
    from embq.index.faiss_module import faiss

    try:
        faiss().index_factory(dim, parsed.factory(2))
    except RuntimeError as error:
        reason = str(error).rsplit(": ", 1)[-1].strip()
        raise UsageError(
            f"faiss cannot build --index-key {text} for {dim} dimensions: {reason}",
            next_step="Leave --index-key out, and a key is chosen by the memory allowed.",
        ) from None


def _unusable(text: str, why: str, instead: str) -> UsageError:
    return UsageError(f"--index-key {text} cannot be built here: {why}", next_step=f"Use {instead}.")


def _unknown(text: str, part: str, lists: int) -> UsageError:
    return UsageError(
        f"--index-key {text}: {part!r} is not known",
        next_step=f"Write it as IVF{lists},RaBitQ4: lists, then one of Flat, SQfp16, SQbf16, SQ8, SQ6, SQ4, RaBitQ1 to "
        "RaBitQ9, EDEN1 to EDEN9, PQ<pieces>x4 or x8; before them PCAR<dims>, RR<dims> or OPQ<pieces>_<dims>.",
    )


def _pieces_near(last: str, dim: int) -> str:
    """The PQ with the number of pieces nearest to the one written that divides the dimensions."""
    pieces, _, bits = last.removeprefix("PQ").partition("x")
    nearest = min((p for p in range(1, dim + 1) if dim % p == 0), key=lambda p: abs(p - int(pieces)))
    return f"PQ{nearest}x{bits or 8}"
