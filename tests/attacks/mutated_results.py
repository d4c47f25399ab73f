"""Reads mutated results, as a process of its own: one that crashes its reader is seen by its exit status."""

from __future__ import annotations

import random
import sys
from collections import Counter

import numpy as np

from embq.core.errors import OutputError
from embq.core.rows.results import ResultDecoder, encode_result, row_schema
from embq.core.rows.spec import Column, RowSpec
from embq.core.units import Failure, Sample

COLUMNS = (
    Column(name="n", type="int64", path=("n",)),
    Column(name="b", type="bool", path=("b",)),
    Column(name="s", type="string", path=("s",)),
)
SCHEMA = row_schema(("text", "image"), {"text": 4, "image": 3}, RowSpec(columns=COLUMNS), compared=("similarity",))
WORDS = (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1)


def result(rows: int = 7) -> bytes:
    samples = [Sample(ordinal=i, key=f"k{i}", text="t" * i, metadata='{"n":1,"b":true,"s":"x"}') for i in range(rows)]
    vectors = {
        "text_embedding": np.ones((rows, 4), "float16"),
        "image_embedding": np.ones((rows, 3), "float16"),
        "similarity": np.ones(rows, "float32"),
    }
    failures = [Failure(ordinal=rows, key="z", code="decode", message="no image")]
    return encode_result(samples, vectors, failures, SCHEMA, COLUMNS)


def mutated(data: bytes, random_: random.Random) -> bytes:
    """`data` with one to four changes: a byte, a bit, an aligned word of 4 or 8 bytes, eight bytes less or more."""
    found = bytearray(data)
    for _ in range(random_.choice((1, 1, 1, 2, 4))):
        at, kind = random_.randrange(len(found) - 16), random_.randrange(6)
        word = random_.choice((*WORDS, len(found), random_.getrandbits(32)))
        if kind == 0:
            found[at] = random_.getrandbits(8)
        elif kind == 1:
            found[at] ^= 1 << random_.randrange(8)
        elif kind == 2:
            found[at & ~3 : (at & ~3) + 4] = (word & 0xFFFFFFFF).to_bytes(4, "little")
        elif kind == 3:
            found[at & ~7 : (at & ~7) + 8] = word.to_bytes(8, "little")
        elif kind == 4:
            del found[at : at + 8]
        else:
            found[at:at] = bytes(8)
    return bytes(found)


def read(seed: int, count: int) -> Counter[str]:
    """Read so many mutations, and all values of those that are taken; gives how many were "taken" and "refused"."""
    random_, data = random.Random(seed), result()
    seen: Counter[str] = Counter()
    for _ in range(count):
        try:
            found = ResultDecoder(SCHEMA).decode(mutated(data, random_))
        except OutputError:
            seen["refused"] += 1
        else:
            found.rows.to_pylist(), found.failures.to_pylist()
            seen["taken"] += 1
    return seen


if __name__ == "__main__":
    sys.stdout.write(repr(dict(read(int(sys.argv[1]), int(sys.argv[2])))))
