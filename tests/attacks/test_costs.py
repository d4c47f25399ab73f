"""What a value costs: time in proportion to its length, whatever it holds."""

from __future__ import annotations

import ast
import fnmatch
import re
import struct
from pathlib import Path

import pytest

from embq.core.cards import CARDS, names
from embq.core.errors import EmbqError, InputError, OutputError, TryLaterError
from embq.core.filter import evaluation
from embq.core.filter.condition import Condition
from embq.core.redaction import MAX_TEXT, cut, masked
from embq.fleet import launcher
from embq.index.index_files.lists import ListsBytes, read_lists
from embq.sources.access.patterns import expand_braces, matcher
from tests.attacks.expressions import ROOT, attacks, call_of, expressions, is_slow

EXAMPLES = {
    "core/cards.py: names(name)": [names(card) for card in CARDS],
    "core/process/limits.py: f'^(?:{names})\\\\s*: (.*)$'": [],  # of /proc/cpuinfo, which is the kernel's
    "core/queue/uploads.py: f'run\\\\.json|manifest/\\\\d{{5}}\\\\.parquet|{INPUTS}/[0-9a-f]{{5,16}}(/[^/\\\\0]+)+'": [
        r"run\.json|manifest/\d{5}\.parquet|_inputs/[0-9a-f]{5,16}(/[^/\0]+)+"
    ],
    "core/run/run_info.py: f\"\\\\A({'|'.join(FORMATS)})\\\\Z\"": [r"\A(parquet|hdf5)\Z"],
    "core/wire.py: f\"\\\\A(?:{'|'.join(map(re.escape, words))})\\\\Z\"": [r"\A(?:one|other)\Z"],
    "index/faiss_file.py: re.escape(prefix + path.name) + behind": [r"\.a\.faiss\.[0-9]*\.[0-9a-f]{8}"],
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

SHORT = {"index/plan/index_key.py": 200}
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


def test_every_command_that_is_waited_for_has_a_time_limit() -> None:
    unlimited = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in ROOT.rglob("*.py")
        if "subprocess" in (text := path.read_text(encoding="utf-8"))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in {f"subprocess.{name}" for name in ("run", "call", "check_call", "check_output")}
        and "timeout" not in {word.arg for word in node.keywords}
    ]
    assert not unlimited


def test_a_command_of_an_engine_that_does_not_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "CHECK_S", 0.2)
    with pytest.raises(TryLaterError, match=r"sleep has not ended within 0\.2 s"):
        launcher.called(["sleep", "60"], needs="", see="")


S = "SECRETSECRETSECRETSECRET"


@pytest.mark.parametrize(
    "secret", [f"redis://user:{S}@host", f"hf_{S}", f"password={S}", f"bearer {S}", f"https://x/?token={S}"]
)
def test_no_part_of_a_secret_at_the_cut_is_left(secret: str) -> None:
    for before in range(2000 - len(secret) - 5, 2001):
        message = EmbqError(
            cut("word " * (before // 5) + "x " + "." * (before % 5) + secret + " tail" * 1000, 2000)
        ).message
        assert "SECR" not in message
        assert len(message) < 2100


@pytest.mark.parametrize(
    "fragment", ["://:", "://a:b@", "://", "password=", "bearer ", "hf_a", '"', "a_", "?token=", "@"]
)
def test_masking_takes_time_in_proportion_to_its_text(fragment: str) -> None:
    assert not is_slow(masked, "", fragment, "", 1 << 13)
    assert not is_slow(masked, "", fragment, "@ ", 1 << 13)


def test_a_message_is_cut() -> None:
    assert len(EmbqError("://:" * 1_000_000).message) < 2 * MAX_TEXT


@pytest.mark.parametrize(
    "text", ["{a,b}" * 100_000, "{" * 100_000, "{0..99999999999}", "{0..9" + "9" * 5000 + "}", "}{{0..999999999}"]
)
def test_braces_stand_for_few_enough_names(text: str) -> None:
    with pytest.raises(InputError, match="braces"):
        next(expand_braces(text, ""))


def test_stars_of_a_pattern_do_not_multiply() -> None:
    fits = matcher("**/" * 20 + "*a" * 20 + "*b")
    assert not is_slow(fits, "", "a", "", 1 << 12)
    assert not is_slow(fits, "", "a/", "", 1 << 9)


_HEADER = struct.Struct("<4sQQ4sQ")
LISTS = {
    "rows of terabytes": _HEADER.pack(b"ilar", 2, 8, b"full", 2) + struct.pack("<QQ", 1 << 40, 1 << 40),
    "more empty lists than memory": _HEADER.pack(b"ilar", 1 << 40, 8, b"sprs", 0),
    "more lists than an array": _HEADER.pack(b"ilar", 1 << 62, 8, b"sprs", 0),
    "a longer table than the file": _HEADER.pack(b"ilar", 1 << 40, 8, b"full", 1 << 40),
    "long codes": _HEADER.pack(b"ilar", 1, 1 << 50, b"full", 1) + struct.pack("<Q", 1 << 30),
    "no header": b"ilar",
}


@pytest.mark.parametrize("content", LISTS.values(), ids=LISTS)
def test_lists_claim_no_more_than_their_file_has(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.lists"
    path.write_bytes(content)
    count = struct.unpack("<Q", content[4:12])[0] if len(content) > 12 else 1
    for read in (
        lambda: ListsBytes(path, count),
        lambda: read_lists(path, mapped=True),
        lambda: read_lists(path, mapped=False),
    ):
        with pytest.raises(OutputError) as caught:
            read()
        assert caught.value.code == "index_damaged"


def test_a_filter_with_a_number_of_too_many_digits_is_refused() -> None:
    condition = Condition("n", "=", "9" * 5000)
    with pytest.raises(InputError, match="holds numbers"):
        evaluation._number(condition.value, condition)
