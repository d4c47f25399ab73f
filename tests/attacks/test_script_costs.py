"""What a call of a script in the broker costs at worst: while one runs, nobody else is answered.

Every script, with every argument and every stored value that it reads as hostile as can be, on a real server, by the
CPU time of the server's main thread. Doubling a value may double the time; or the call is refused.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

import pytest
import redis

from embq.core.errors import LimitError
from embq.core.queue.keys import INDEXING, RATES, RUN_PARTS, TURNS, WORKERS, run_key, worker_key
from embq.core.queue.ledger import Ledger
from embq.core.queue.lua import MAX_TEXT_BYTES, MAX_UNITS, SCRIPTS
from embq.core.queue.result_stream import PublishVerdict
from embq.core.queue.scripts import Script, load_scripts
from tests.support.servers.guarded import SERVERS_OF_WHOLE_RUNS, guarded_server

RUN, GEN, U, TOKEN = "c0" * 8, "1-0", "3", "1-0:w:abc"
KEY = {part: run_key(RUN, part) for part in (*RUN_PARTS, "asked", "writer")}
RUN_KEYS = [KEY[part] for part in RUN_PARTS]
REPORT = worker_key("w")

ARGUMENTS: dict[str, list[str | int]] = {
    "claim": [U, TOKEN, GEN, 20_000, "f" * 32, 1, 1],
    "claim to help": [U, "1-0:v:abc", GEN, 20_000, "f" * 32, 1, 1],
    "start": [U, TOKEN],
    "beat": [GEN, 20_000, U, TOKEN, 1_000, 100],
    "publish": [U, TOKEN, 10, "tokens", 5, "data", "x"],
    "release": [U, TOKEN, "fail", "code", "message", 1],
    "abandon": ["w", 1, "message", "owner", 0, TOKEN, "2"],
    "next": [GEN, 10, 1, 0, 1, 1, 10, 1],
    "next at the tail": [GEN, 10, 1, 1, 1, 1, 10, 1],
    "commit": [1, 1, 1, 1, 1, 1, "", "1-1 10 5", U],
    "reject": ["1-1 10 5", U, TOKEN, "code", "message", 1],
    "recheck": [],
    "grow": [GEN, 20],
    "control": [0, "state", "cancelled", "priority", 5],
    "writer_lock": ["me", 5_000, 0],
    "report": ["w", "{}", 20_000],
    "rate": ["field", "{}"],
    "swap": ["", "new"],
    "forget": ["queue", "record"],
}
"""Script, with what it is called for -> what a service sends."""
KEYS_OF = {
    "control": [*RUN_KEYS, KEY["asked"]],
    "writer_lock": [KEY["writer"]],
    "report": [WORKERS, REPORT],
    "rate": [RATES],
    "swap": [TURNS],
    "forget": [INDEXING, *RUN_KEYS],
}
META = sorted({name for text in SCRIPTS.values() for name in re.findall(r"\b(?:get|num|add)\('(\w+)'", text)})
STORED: dict[str, Callable[[Any, str], object]] = {
    "gen": lambda pipe, text: pipe.hset(KEY["meta"], "gen", text),
    "state": lambda pipe, text: pipe.hset(KEY["meta"], "state", text),
    "meta": lambda pipe, text: pipe.hset(KEY["meta"], mapping=dict.fromkeys({*META} - {"gen", "state"}, text)),
    **{
        part: lambda pipe, text, key=KEY[part]: pipe.hset(key, mapping={U: text, TOKEN: text, text: text})
        for part in ("owner", "spare", "busy", "att", "poison", "pub")
    },
    **{part: lambda pipe, text, key=KEY[part]: pipe.zadd(key, {text: 0}) for part in ("hinted", "due")},
    "res": lambda pipe, text: pipe.xadd(KEY["res"], {text: text}),
    "done": lambda pipe, text: pipe.set(KEY["done"], text),
    "asked": lambda pipe, text: pipe.hset(KEY["asked"], mapping={"state": text, "priority": text}),
    "writer": lambda pipe, text: pipe.set(KEY["writer"], text),
    WORKERS: lambda pipe, text: pipe.zadd(WORKERS, {text: 0}),
    REPORT: lambda pipe, text: pipe.set(REPORT, text),
    RATES: lambda pipe, text: pipe.hset(RATES, mapping={"field": text, text: text}),
    TURNS: lambda pipe, text: pipe.set(TURNS, text),
    INDEXING: lambda pipe, text: pipe.hset(INDEXING, "queue", text),
}
"""Place -> how a text is put there."""

TEXTS = ["9", " ", ":", "-", "9 ", "9-"]
"""What hostile texts repeat: all that a pattern of ours takes, so that each runs to the end before it fails there."""
END = " \0!"
SIZES = (256, 512, 1_024, 2_048, 4_096, 8_192)
FLOOR_US = 1_000


@dataclass(slots=True)
class Costs:
    """Calls on a server, each on the same run."""

    client: redis.Redis
    scripts: dict[str, Script]

    def call(
        self, name: str, arguments: Sequence[str | int], stored: Sequence[tuple[str, str]] = ()
    ) -> tuple[object, int]:
        """The answer to a call where `stored` lies in the broker, and the microseconds of CPU that it took."""
        if name == "next" and arguments[3] == 0:  # the time of the decision that leases may be taken away
            arguments = [*arguments[:3], round(time.time() * 1000), *arguments[4:]]
        keys = KEYS_OF.get(name, RUN_KEYS)
        with self.client.pipeline(transaction=False) as pipe:
            pipe.delete(*KEY.values(), WORKERS, REPORT, RATES, TURNS, INDEXING)
            pipe.hset(KEY["meta"], mapping={"gen": GEN, "state": "running", "total": 16, "cursor": 16, "done": 16})
            pipe.hset(KEY["owner"], U, TOKEN)
            pipe.hset(KEY["busy"], TOKEN, "1 2 100")
            pipe.hset(KEY["att"], U, 1)
            pipe.zadd(KEY["due"], {U: 0})
            pipe.xadd(KEY["res"], {"u": U}, id="1-1")
            pipe.xgroup_create(KEY["res"], "w", id="0")
            for place, text in stored:
                PUT[place](pipe, text)
            pipe.info("cpu")
            pipe.evalsha(self.scripts[name.split()[0]].sha, len(keys), *keys, *arguments)
            pipe.info("cpu")
            *_, before, answer, after = pipe.execute(raise_on_error=False)
        return answer, cpu_us(after) - cpu_us(before)

    def grow_linearly(
        self, call: Callable[[int], tuple[object, int]], sizes: Sequence[int] = SIZES, *, slack: float = 1.5
    ) -> None:
        """Enlarge a value until it is refused; the time may grow no more than its size, but for noise."""
        before = call(sizes[0])[1]
        for smaller, larger in pairwise(sizes):
            answer, took = call(larger)
            allowed = FLOOR_US + slack * larger / smaller * before
            if took > allowed:
                took = min(took, *(call(larger)[1] for _ in range(3)))
            assert took <= allowed, f"{took} us with {larger}, {before} us with {smaller}"
            if is_refused(answer):
                return
            before = took


def cpu_us(info: Mapping[str, float]) -> int:
    return round(1e6 * (info["used_cpu_user_main_thread"] + info["used_cpu_sys_main_thread"]))


def is_refused(answer: object) -> bool:
    return isinstance(answer, redis.ResponseError) and str(answer).startswith("LIMIT ")


def places_of(name: str) -> list[str]:
    """The places below the keys of a script."""
    keys = KEYS_OF.get(name, RUN_KEYS)
    in_meta = ["gen", "state"] if KEY["meta"] in keys else []
    return [*in_meta, *(place for place in STORED if KEY.get(place, place) in keys)]


def hostile(text: str, size: int) -> str:
    return text * (size // len(text) - len(END)) + END


@pytest.fixture(scope="module", params=SERVERS_OF_WHOLE_RUNS)
def costs(request: pytest.FixtureRequest) -> Iterator[Costs]:
    with guarded_server(request.param) as server, server.client("admin") as client:
        client.config_set("appendonly", "no")
        scripts = load_scripts(client)
        for script in scripts.values():
            client.script_load(script.text)
        yield Costs(client, scripts)


def test_every_script_and_every_key_is_attacked() -> None:
    assert {name.split()[0] for name in ARGUMENTS} == set(SCRIPTS)
    assert set(RUN_PARTS) <= set(STORED)


def test_what_a_service_sends_is_taken_and_does_its_work(costs: Costs) -> None:
    """Otherwise the costs below would be those of refusals."""
    answers = {name: costs.call(name, ARGUMENTS[name])[0] for name in ARGUMENTS}
    assert {name: answer for name, answer in answers.items() if isinstance(answer, Exception)} == {}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_long_argument_costs_linear_time_or_is_refused(name: str, costs: Costs) -> None:
    for at, text in product(range(len(ARGUMENTS[name])), TEXTS):

        def call(size: int, at: int = at, text: str = text) -> tuple[object, int]:
            arguments = list(ARGUMENTS[name])
            arguments[at] = hostile(text, size)
            return costs.call(name, arguments)

        costs.grow_linearly(call)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_long_stored_value_costs_linear_time(name: str, costs: Costs) -> None:
    for place, text in product(places_of(name), TEXTS):

        def call(size: int, place: str = place, text: str = text) -> tuple[object, int]:
            return costs.call(name, ARGUMENTS[name], [(place, hostile(text, size))])

        costs.grow_linearly(call)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_long_argument_beside_a_longer_stored_value_costs_linear_time(name: str, costs: Costs) -> None:
    """What is searched for and what is searched through are both the caller's."""
    texts = [at for at, value in enumerate(ARGUMENTS[name]) if isinstance(value, str)]
    for place, at, text in product(places_of(name), texts, (":", "x")):

        def call(size: int, place: str = place, at: int = at, text: str = text) -> tuple[object, int]:
            arguments = list(ARGUMENTS[name])
            arguments[at] = hostile(text, size)
            return costs.call(name, arguments, [(place, text * (64 * size))])

        costs.grow_linearly(call, (1_024, 4_096))


@pytest.mark.parametrize("name", ARGUMENTS)
def test_more_arguments_and_keys_and_longer_keys_than_a_service_sends_are_refused(name: str, costs: Costs) -> None:
    answer, _ = costs.call(name, [*ARGUMENTS[name], *["x"] * 8_000])
    assert is_refused(answer), answer
    keys = KEYS_OF.get(name, RUN_KEYS)
    with pytest.raises(redis.ResponseError, match="LIMIT more than 12 keys"):
        costs.client.evalsha(costs.scripts[name.split()[0]].sha, 13, *keys, *["k"] * (13 - len(keys)), *ARGUMENTS[name])
    for at in range(len(keys)):
        long = [*keys[:at], "k" * 300, *keys[at + 1 :]]
        with pytest.raises(redis.ResponseError, match=f"LIMIT key {at + 1} has more than 256 bytes"):
            costs.client.evalsha(costs.scripts[name.split()[0]].sha, len(long), *long, *ARGUMENTS[name])


def test_the_refusal_of_all_that_a_server_takes_costs_linear_time(costs: Costs) -> None:
    costs.grow_linearly(
        lambda count: (None, costs.call("start", [*ARGUMENTS["start"], *[U, TOKEN] * count])[1]),
        (100_000, 400_000),
    )


@pytest.mark.parametrize("part", [part for part in RUN_PARTS if part not in ("meta", "done")])
def test_many_members_cost_linear_time(part: str, costs: Costs) -> None:
    """Also where the clock seems to be set back, and no unit to be passed."""
    for name in ARGUMENTS:
        if KEY[part] in KEYS_OF.get(name, RUN_KEYS):

            def call(count: int, name: str = name) -> tuple[object, int]:
                return costs.call(name, ARGUMENTS[name], [("many", f"{part} {count}")])

            costs.grow_linearly(call, (1_000, 4_000), slack=3)  # a sorted set costs n log n


def put_many(pipe: Any, part_and_count: str) -> None:
    """That many members in a part of the run, and a run that seems to have a hundred million units to pass."""
    part, count = part_and_count.split()
    names = [str(n) for n in range(int(count))]
    pipe.hset(KEY["meta"], mapping={"fed_ms": 2**42, "cursor": 0, "total": 10**8})
    if part in ("hinted", "due"):
        pipe.zadd(KEY[part], dict.fromkeys(names, 2**42))
    elif part == "res":
        pipe.xadd(KEY[part], dict.fromkeys(names, "x"))
    else:
        pipe.hset(KEY[part], mapping=dict.fromkeys(names, TOKEN))


def test_a_large_stored_value_is_read_once_in_a_call(costs: Costs) -> None:
    one, large = "x" * 16, "x" * (1 << 20)
    for name, fixed in (("start", 0), ("beat", 2), ("commit", 7)):
        each = ARGUMENTS[name][fixed:]
        for place in ("owner", "spare", "att"):
            arguments = [*ARGUMENTS[name], *each * (MAX_UNITS - 1)]
            small_us = min(costs.call(name, arguments, [(place, one)])[1] for _ in range(3))
            answer, took = costs.call(name, arguments, [(place, large)])
            assert not isinstance(answer, Exception)
            assert took <= 3 * small_us + 10 * FLOOR_US, (name, place)


def test_results_are_looked_up_once(costs: Costs) -> None:
    """Units that all claim to have been published as one entry, of as many fields as there may be."""

    def call(units: int) -> tuple[object, int]:
        return costs.call("next", ARGUMENTS["next"], [("one entry", str(units))])

    costs.grow_linearly(call, (2, 4, 8, 16, 400))


def put_one_entry(pipe: Any, units: str) -> None:
    pipe.hset(KEY["meta"], "total", 1_000)
    pipe.xadd(KEY["res"], {str(n): "x" for n in range(20_000)}, id="2-1")
    pipe.zadd(KEY["due"], {str(u): 0 for u in range(int(units))})
    pipe.hset(KEY["pub"], mapping={str(u): "t 2-1" for u in range(int(units))})


PUT = {**STORED, "many": put_many, "one entry": put_one_entry}


def test_a_call_of_as_many_units_as_a_worker_holds_is_sent_in_parts(costs: Costs) -> None:
    costs.call("start", ARGUMENTS["start"])
    ledger = Ledger(costs.client, RUN)
    held = [(u, f"1-0:w:{u}") for u in range(4 * MAX_UNITS + 1)]
    with costs.client.pipeline() as pipe:
        pipe.hset(KEY["owner"], mapping={str(u): token for u, token in held[:-1]})
        pipe.hset(KEY["meta"], "total", 10_000)
        pipe.execute()
    assert ledger.start(held) == {held[-1][1]}
    outlook = {token: (1.0, 1.0) for _, token in held}
    assert ledger.beat(GEN, held, lease_s=20, outlook=outlook) == ("running", {held[-1][1]})
    assert ledger.beat("2-0", held, lease_s=20) == ("gen", {token for _, token in held})
    assert ledger.abandon("w", "died", blame=dict.fromkeys((token for _, token in held), 1)) == len(held) - 1


def test_what_is_refused_is_a_typed_error(costs: Costs) -> None:
    costs.call("start", ARGUMENTS["start"])
    ledger = Ledger(costs.client, RUN)
    with pytest.raises(LimitError, match=f"argument 4 has more than {MAX_TEXT_BYTES} bytes") as caught:
        ledger.release(3, TOKEN, failed=("x" * (MAX_TEXT_BYTES + 1), ""))
    assert caught.value.code == "broker_limit"
    assert ledger.client.hget(KEY["owner"], U) == TOKEN.encode(), "nothing of it was done"


def test_the_largest_result_and_message_are_taken(costs: Costs) -> None:
    costs.call("start", ARGUMENTS["start"])
    ledger = Ledger(costs.client, RUN)
    fields = {f"field{n}": "x" for n in range(20)} | {"data": bytes(20 << 20)}
    assert ledger.publish(3, TOKEN, fields, size=20 << 20) is PublishVerdict.ACCEPTED
    assert ledger.release(3, TOKEN, failed=("x" * 64, "\U0001f600" * 1_000)) is False
