"""The strict reader: what it takes, and that nothing but MalformedError comes out of it."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Annotated

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta

from embq.core import wire
from embq.core.errors import InputError
from embq.core.service.log import Events
from embq.core.wire import Count, MalformedError, PathText, RunId, Seconds, ShortText, Skips


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    run: RunId
    output: PathText
    units: Count = 0
    speed: Seconds = 0.0
    pairs: tuple[tuple[ShortText, Count], ...] = ()
    notes: dict[ShortText, ShortText] = field(default_factory=dict)


GOOD = {"run": "0123456789abcdef", "output": "/data/out", "units": 7, "speed": 1.5, "pairs": [["a", 1]], "notes": {}}
FORM = Form(run="0123456789abcdef", output="/data/out", units=7, speed=1.5, pairs=(("a", 1),))


def test_a_form_is_read_and_written_back_byte_equal() -> None:
    assert wire.read(Form, json.dumps(GOOD), what="form") == FORM
    assert wire.write(FORM) == json.dumps(GOOD)


def test_a_path_keeps_bytes_that_are_not_utf8() -> None:
    path = b"/data/\xff".decode(errors="surrogateescape")
    assert wire.read(Form, json.dumps({**GOOD, "output": path}), what="form").output == path


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"null",
        b"[]",
        b"7",
        b'"form"',
        b"{",
        b"{}",
        b"\xff",
        b"\xef\xbb\xbf" + json.dumps(GOOD).encode(),
        json.dumps(GOOD).encode("utf-16"),
        json.dumps(GOOD).encode()[:-1],
        json.dumps(GOOD).encode() + b"x",
        b"[" * 100_000,
        b'{"run":' * 50_000,
        b"9" * 5_000,
        *(
            json.dumps({**GOOD, **wrong}).encode()
            for wrong in (
                {"run": None},
                {"run": 7},
                {"run": "x/../../etc"},
                {"run": "0123456789abcdef\n"},
                {"run": "0123456789ABCDEF"},
                {"output": ""},
                {"output": "/a\0b"},
                {"output": "/a/\ud800"},
                {"output": "/a/\udd00"},
                {"output": "/" * 10_000},
                {"units": -1},
                {"units": "7"},
                {"units": 7.0},
                {"units": True},
                {"units": 2**63},
                {"units": 10**400},
                {"speed": float("nan")},
                {"speed": float("inf")},
                {"speed": -1.0},
                {"pairs": [["a"]]},
                {"pairs": {"a": 1}},
                {"pairs": [["a", 1, 2]]},
                {"notes": {"a": "x" * 2_000}},
                {"notes": {"a": "\ud800"}},
                {"notes": []},
            )
        ),
        json.dumps(GOOD).replace("1.5", "1e999").encode(),
    ],
    ids=lambda text: repr(text[:24]),
)
def test_anything_else_is_malformed(text: bytes) -> None:
    with pytest.raises(MalformedError, match=r"\Aform is malformed: .+\Z") as raised:
        wire.read(Form, text, what="form")
    assert isinstance(raised.value, InputError)
    assert raised.value.code == "malformed"
    assert len(raised.value.message) < 400


def test_a_text_beyond_its_bound_is_not_parsed() -> None:
    with pytest.raises(MalformedError, match="at most 10"):
        wire.read(Form, json.dumps(GOOD).encode(), what="form", most_bytes=10)
    with pytest.raises(MalformedError, match="at most 10"):
        wire.read(Form, json.dumps(GOOD), what="form", most_bytes=10)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)


@given(st.binary(max_size=200) | values.map(lambda value: json.dumps(value).encode()))
def test_no_bytes_make_another_error(data: bytes) -> None:
    with pytest.raises(MalformedError):
        wire.read(Form, data, what="form")


@given(st.dictionaries(st.sampled_from(sorted(GOOD)), values, min_size=1))
def test_no_values_of_its_fields_make_another_error(wrong: dict[str, object]) -> None:
    try:
        form = wire.read(Form, json.dumps({**GOOD, **wrong}), what="form")
    except MalformedError:
        return
    assert wire.read(Form, wire.write(form), what="form") == form


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    taken: Count = 0
    rate: Annotated[float, Meta(ge=0, le=10)] = 0.0
    end: ShortText = ""


def test_a_hash_holds_its_numbers_as_text() -> None:
    raw = {b"taken": b"12", b"rate": b"0.5", b"end": b"7", b"other": b"kept by a later version"}
    assert wire.read_hash(State, raw, what="state") == State(taken=12, rate=0.5, end="7")
    assert wire.read_hash(State, {}, what="state") == State()


@given(st.dictionaries(st.sampled_from([b"taken", b"rate"]) | st.binary(max_size=4), st.binary(max_size=30)))
def test_a_hash_is_read_or_malformed(raw: dict[bytes, bytes]) -> None:
    try:
        state = wire.read_hash(State, raw, what="state")
    except MalformedError:
        return
    assert state.taken >= 0
    assert 0 <= state.rate <= 10


@pytest.mark.parametrize(
    "raw", [{b"taken": b"x"}, {b"taken": b""}, {b"rate": b"nan"}, {b"rate": b"inf"}, {b"end": b"\xff"}, {b"\xff": b"1"}]
)
def test_a_hash_with_another_value_is_malformed(raw: dict[bytes, bytes]) -> None:
    with pytest.raises(MalformedError):
        wire.read_hash(State, raw, what="state")


def test_what_does_not_parse_is_left_out_and_counted_and_the_rest_is_read(caplog: pytest.LogCaptureFixture) -> None:
    before = wire.skip_counts().get("state of a test", 0)
    raw = {b"good": b'{"taken": 3}', b"bad\n\x1b[2J": b"{", b"\xff": b"{}", b"wrong": b'{"taken": "3"}'}
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert wire.read_each(State, raw, what="state of a test") == {"good": State(taken=3)}
    assert wire.skip_counts()["state of a test"] == before + 6
    named = [record.fields["key"] for record in caplog.records if record.event == "malformed_skipped"]
    assert sorted(named) == ["\\xff", "bad\n\x1b[2J", "wrong"]


def test_the_log_of_what_is_skipped_has_a_bound(caplog: pytest.LogCaptureFixture) -> None:
    minutes = [0.0]
    skips = Skips(Events("wire"), clock=lambda: minutes[0] * 60)
    with caplog.at_level(logging.WARNING):
        for number in range(20_000):
            skips.add("record", str(number), "it is none")
        assert len(caplog.records) == Skips.LINES_A_MINUTE
        minutes[0] = 1.0
        skips.add("record", "the next", "it is none")
    assert skips.counts() == {"record": 20_001}
    assert caplog.records[-1].fields["others_unnamed"] == 20_000 - Skips.LINES_A_MINUTE


# --- threads ---

FORMS_OF_THREADS = """
import sys, threading
from typing import Annotated
import msgspec
from embq.core import wire

sys.setswitchinterval(1e-6)
for number in range(300):
    fields = [(name, Annotated[int, msgspec.Meta(ge=0)] | None, None) for name in "abcdefgh"]
    inner = msgspec.defstruct(f"Inner{number}", fields)
    form = msgspec.defstruct(f"Form{number}", [*fields, ("inner", inner | None, None)])
    start = threading.Barrier(4)
    def convert():
        start.wait()
        assert wire.convert(form, {"inner": {"a": 1}}, what="form").inner.a == 1
    threads = [threading.Thread(target=convert) for _ in range(4)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
print("done")
"""


def test_threads_may_convert_to_a_new_form_at_once() -> None:
    done = subprocess.run([sys.executable, "-c", FORMS_OF_THREADS], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
