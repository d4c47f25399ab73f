"""A run on a device whose memory is too small for what its passes start with."""

from __future__ import annotations

import json
import random
from pathlib import Path

from tests.e2e.check import check_complete
from tests.e2e.session import ended, logs

DIM = 8
ROOM, BUDGET = 60, 70
UNIT = 100
TEXTS = 5_000
"""Enough for the budget to grow back even where windows end so that it was made smaller four times."""

IMPOSSIBLE = 50
"""The number of the text that has more words than there is room for."""


def write_texts_of_all_lengths(path: Path) -> tuple[dict[str, bytes], dict[str, str]]:
    """Long texts first, among them one that fits no pass, then very short ones; gives what becomes of them."""
    random_ = random.Random(1)
    rows: dict[str, bytes] = {}
    failures: dict[str, str] = {}
    with path.open("w") as file:
        for number in range(TEXTS):
            words = random_.randint(1, 30) if number < 2 * UNIT else 1
            if number == IMPOSSIBLE:
                words = ROOM + 1
            key, text = str(number), " ".join(f"{number}.{word}" for word in range(words))
            file.write(json.dumps({"id": key, "text": text}) + "\n")
            if words > ROOM:
                failures[key] = "out_of_memory"
            else:
                rows[key] = text.encode()
    return rows, failures


def test_passes_are_smaller_while_the_device_is_full_and_every_text_but_the_impossible_one_is_a_row(
    short_tmp: Path,
) -> None:
    root, source = short_tmp / "out", short_tmp / "texts.jsonl"
    rows, failures = write_texts_of_all_lengths(source)
    model = f"stub:{DIM}?batch_size=4&tokens={BUDGET}&max_tokens={ROOM}"
    status, _, stderr = ended("run", source, "-o", root, "-m", model, "--unit-size", str(UNIT), "--quiet")
    assert status == 3, stderr
    check_complete(root, rows, units=TEXTS // UNIT, dim=DIM, failures=failures)
    said = logs(root)
    assert f"tokens={ROOM + 1}" in said
    first, last = said.index("memory_full"), said.index("memory_back")
    assert first < last, "the budget recovers when the passes have fitted for a while"
    status, stdout, stderr = ended("verify", root, "--json")
    report = json.loads(stdout)
    assert (report["ok"], report["vectors_recomputed"]) == (True, len(rows)), report
