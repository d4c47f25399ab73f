"""What a value costs: time in proportion to its length, whatever it holds."""

from __future__ import annotations

import fnmatch
import re

from embq.core.cards import CARDS, names
from tests.attacks.expressions import attacks, call_of, expressions, is_slow

EXAMPLES = {
    "app/planning/speeds.py: pattern": [r", \d+ cores$"],
    "core/cards.py: names(name)": [names(card) for card in CARDS],
    "core/process/limits.py: f'^(?:{names})\\\\s*: (.*)$'": [],  # of /proc/cpuinfo, which is the kernel's
    "core/queue/uploads.py: f'run\\\\.json|manifest/\\\\d{{5}}\\\\.parquet|{INPUTS}/[0-9a-f]{{5,16}}(/[^/\\\\0]+)+'": [
        r"run\.json|manifest/\d{5}\.parquet|_inputs/[0-9a-f]{5,16}(/[^/\0]+)+"
    ],
    "core/run/run_info.py: f\"\\\\A({'|'.join(FORMATS)})\\\\Z\"": [r"\A(parquet|hdf5)\Z"],
    "core/wire.py: f\"\\\\A(?:{'|'.join(map(re.escape, words))})\\\\Z\"": [r"\A(?:one|other)\Z"],
    "indexer/faiss_file.py: re.escape(prefix + path.name) + behind": [r"\.a\.faiss\.[0-9]*\.[0-9a-f]{8}"],
    "sources/access/patterns.py: fnmatch.translate(part)": [fnmatch.translate("*a*a*a*[ab]*a?*b")],
    "training/mmoclip/judgement.py: f'\\\\b{required.BASELINE_GPU}\\\\b'": [r"\bH100\b"],
    "training/shards/conversion_plan.py: re.escape(self.prefix) + f'[0-9]{{{self.width},}}' + re.escape(self.suffix)": [
        r"0-[0-9]{6,}0\.tar"
    ],
    "worker/embedders/text/lora.py: f'(?:.*\\\\.)?{re.escape(key)}'": [r"(?:.*\.)?a\.a\.a\.q_proj"],
    "writer/staging.py: f'[!-.0-~]{{1,240}}(?:{re.escape(RESULT_SUFFIX)}|{re.escape(PART_SUFFIX)})'": [
        r"[!-.0-~]{1,240}(?:\.result|\.part)"
    ],
}
"""Patterns of expressions that depend on more than constants of their module: file and source -> what they can be."""

SHORT = {"indexer/plan/index_key.py": 200}
"""Files that refuse longer texts before they use their expressions -> characters."""


def test_no_regular_expression_takes_more_time_than_its_text_is_long() -> None:
    slow, untested = [], []
    for found in expressions():
        module = found.place.partition(":")[0]
        examples = EXAMPLES.get(f"{module}: {found.source}") if found.pattern is None else [found.pattern]
        if examples is None:
            untested.append(f"{module}: {found.source}")
            continue
        for pattern in examples:
            compiled = re.compile(pattern, found.flags)
            for use in sorted(found.uses):
                call = call_of(compiled, use)
                slow += [
                    (found.place, use, attack)
                    for attack in attacks(pattern)
                    if is_slow(call, *attack, SHORT.get(module, 4096))
                ]
    assert not untested, "give an example of what they can be"
    assert not slow
