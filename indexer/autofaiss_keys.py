"""Index keys as users of autofaiss and faiss write them: what of them can be built here, and what to write instead."""

from __future__ import annotations

import re
from dataclasses import dataclass

from core.errors import UsageError
from indexer.codecs import Codec, codec, lists_for

_TRANSFORM = re.compile(r"(OPQ\d+(?:_\d+)?|PCA[RW]{0,2}\d+|RR\d*|Pad\d+|ITQ\d*|L2norm)")
_LISTS = re.compile(r"IVF(\d+)(?:_(HNSW\d*)|\((?:PCA(\d+),)?Flat\))?")
_OUTSIDE_PARENTHESES = re.compile(r",(?![^(]*\))")


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexKey:
    """A factory string, understood.

    Attributes:
        codec: how vectors are kept, with the transform before them.
        nlist: number of lists, or None where the key leaves it open ("Flat").
        coarse: an index over the centroids for searching: "" or "HNSW32".
        note: what is done differently from what was written, or "".
    """

    codec: Codec
    nlist: int | None
    coarse: str = ""
    note: str = ""


def parse_key(text: str, *, dim: int, rows: int) -> IndexKey:
    """The parts of a factory string for `rows` vectors of `dim` dimensions.

    Raises:
        UsageError: faiss has no such index, or it is one that cannot be built in parts and merged; the next step names
            the nearest key that can.
    """
    text = text.replace(" ", "")
    suggested = lists_for(rows)
    if not text:
        raise UsageError("--index-key is empty", next_step="Leave it out, and a key is chosen by the memory allowed.")
    if found := re.search(r",?(?:Refine\(.*\)|RFlat)$", text):
        base = text[: found.start()]
        raise _unusable(
            text,
            "an index with a refinement inside cannot be merged",
            f"--index-key {base} --refine fp16: the same rows, kept on disk beside the index",
        )
    if text.startswith(("IDMap", "IDMap2")):
        rest = text.partition(",")[2]
        raise _unusable(text, "rows carry their ids in the lists anyway", f"--index-key {rest or 'Flat'}")
    *transforms, last = _OUTSIDE_PARENTHESES.split(text)
    lists, nlist, coarse, list_dim = "", None, "", None
    if transforms and (found := _LISTS.fullmatch(transforms[-1])):
        lists, nlist, coarse = transforms.pop(), int(found[1]), found[2] or ""
        list_dim = int(found[3]) if found[3] else None
        if nlist < 1:
            raise UsageError(f"--index-key {text} has no lists", next_step=f"Write IVF{suggested} instead of {lists}.")
    if re.match(r"HNSW|NSG|NNDescent|LSH|IMI", last) or any(part.startswith("IMI") for part in transforms):
        before = "".join(f"{part}," for part in transforms if _TRANSFORM.fullmatch(part))
        raise _unusable(
            text,
            "its lists cannot be merged" if "IMI" in text else "a graph cannot be built in parts and merged",
            f"--index-key {before}IVF{suggested},SQ8",
        )
    if unknown := [part for part in transforms if not _TRANSFORM.fullmatch(part)]:
        raise _unknown(text, unknown[0], suggested)
    if found := re.fullmatch(r"(PQ\d+x4|RaBitQ)fs[r]?(?:_\d+|\d)?", last):
        plain = found[1]
        unpacked = ",".join([*transforms, lists or f"IVF{suggested}", plain])
        raise _unusable(
            text,
            "packed lists cannot be merged",
            f"--index-key {unpacked}: its lists are packed for fast scanning when they are loaded",
        )
    name = ",".join([*transforms, last])
    if nlist is None and name != "Flat":
        wanted = ",".join([*transforms, f"IVF{suggested}", last])
        try:
            codec(name, dim)
        except ValueError:
            raise _unknown(text, last, suggested) from None
        raise _unusable(text, "it has no lists to build in parts", f"--index-key {wanted}")
    try:
        kept = codec(name, dim, list_dim=list_dim)
    except ValueError as error:
        if "cannot be cut" in str(error):
            nearest = _pieces_near(last, dim)
            raise UsageError(
                f"--index-key {text} cannot be built: {error}",
                next_step=f"Write {nearest} instead, or put OPQ before it, which changes the dimensions.",
            ) from None
        raise _unknown(text, last, suggested) from None
    _try_faiss(text, kept, dim)
    note = ""
    if nlist is None:
        nlist, note = 1, "Flat is built as IVF1,Flat: one list, every vector compared"
    return IndexKey(codec=kept, nlist=nlist, coarse=coarse, note=note)


def _try_faiss(text: str, kept: Codec, dim: int) -> None:
    """Lets faiss read the key, with two lists: only what it makes of it is sure."""
    from indexer.faiss_module import faiss

    try:
        index = faiss().index_factory(dim, kept.factory(2))
    except RuntimeError as error:
        reason = str(error).rsplit(": ", 1)[-1].strip()
        raise UsageError(
            f"faiss cannot build --index-key {text} for {dim} dimensions: {reason}",
            next_step="Leave --index-key out, and a key is chosen by the memory allowed.",
        ) from None
    del index


def _unusable(text: str, why: str, instead: str) -> UsageError:
    return UsageError(f"--index-key {text} cannot be built here: {why}", next_step=f"Use {instead}.")


def _unknown(text: str, part: str, lists: int) -> UsageError:
    return UsageError(
        f"--index-key {text}: {part!r} is not known",
        next_step=f"Write it as IVF{lists},RaBitQ4: lists, then one of Flat, SQfp16, SQ8, SQ6, SQ4, RaBitQ1 to "
        "RaBitQ9, EDEN1 to EDEN9, PQ<pieces>x4 or x8; before them PCAR<dims>, RR<dims> or OPQ<pieces>_<dims>.",
    )


def _pieces_near(last: str, dim: int) -> str:
    """The PQ with the number of pieces nearest to the one written that divides the dimensions."""
    wanted, _, bits = last.removeprefix("PQ").partition("x")
    nearest = min((p for p in range(1, dim + 1) if dim % p == 0), key=lambda p: abs(p - int(wanted)))
    return f"PQ{nearest}x{bits or 8}"
