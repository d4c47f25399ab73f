"""Services under poisoned records: producer, writer, worker and `embq serve` go on, and honest runs are exact.

    python -m tests.attacks.uptime [--records 10000] [--seed N] [--output FILE]

A guarded broker, and a service of each kind logged in as its user. Records are written by the rights of a laptop and of
a worker: to every hash, list and stream that these may write, and as bodies to the search server. Among them are loads
that cost more than they cost their sender: unread replies, worst arguments and stored values of scripts, bodies of many
values, another fingerprint for a run. Honest runs are handed over meanwhile. Exits 1 where a service ended, a command
failed or a run was not exact.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter, deque
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import redis

from bench.report import table
from embq.core.benchmark_record import described, write
from embq.core.broker.retry_policy import NotAllowedError
from embq.core.queue.keys import (
    RATES,
    RUN_PARTS,
    RUNS,
    SERVICES,
    TURNS,
    UPLOADS,
    WORKERS,
    run_key,
    service_key,
    upload_key,
    worker_key,
)
from embq.core.queue.scripts import load_scripts
from tests.attacks.borders import borders, forget, small_output
from tests.attacks.mutations import mutated
from tests.attacks.test_costly_requests import BODIES
from tests.attacks.test_hostile_laptops import (
    DIM,
    RECORDS,
    STATES,
    UPLOADS_TEXTS,
    WISHES,
    Box,
    poison_names,
    record_text,
)
from tests.attacks.test_script_costs import ARGUMENTS, TEXTS, hostile
from tests.attacks.test_user_rights import (
    Hostile,
    many_replies,
    queued_arguments,
    queued_commands,
    repeated_fields,
    unfinished_commands,
)
from tests.e2e.check import check_complete
from tests.e2e.served import served
from tests.e2e.session import closed, write_texts
from tests.support.servers.guarded import guarded_server

EVERY = 2_000
"""Poisoned records from one honest run to the next, and from one look at the status to the next."""
SAMPLES, UNIT = 300, 10
HUGE, HUGE_EVERY = b"x" * (40 << 20), 100
"""Value beside small ones, as a server that others have configured takes it, and the records from one to the next."""
COSTLY_EVERY = 25
"""Records from one costly load to the next."""
CLIENTS = {"maxmemory-clients": 1 << 30, "client-output-buffer-limit": "normal 1280mb 64mb 60"}
"""Limits of the server, those of deploy/valkey.conf."""
UNREAD = (many_replies, queued_arguments, queued_commands, repeated_fields, unfinished_commands)
STANDING = 12
"""Connections that are left open with what they sent."""
NO_UNIT = "99999"
ABOUT_UNITS = ("claim", "start", "beat", "publish", "release", "abandon", "reject", "rate", "swap", "forget", "report")
"""Scripts that a worker may call about any unit; with the others it may change a run as its rights allow."""
MOST_MB = 300
"""Peak memory of a service, with the libraries that it imports."""
SERVED = "search"


def main() -> int:
    """Poison, print and write what came of it."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.attacks.uptime", description="Services under poisoned records."
    )
    parser.add_argument("--records", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=random.randrange(10_000))
    parser.add_argument("--output", type=Path, metavar="FILE")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as place, guarded_server("valkey") as server, ExitStack() as stack:
        found = attacked(Box(server, stack, Path(place)), stack, asked.records, random.Random(asked.seed))
    forget()
    table(["records", "number"], [*map(list, found["records"].items())])
    table(["what", "result"], [[name, str(value)] for name, value in found.items() if name != "records"])
    if asked.output:
        write(asked.output, described("uptime", {"seed": asked.seed, **found}))
    return int(bool(found["wrong"]))


def attacked(box: Box, stack: ExitStack, records: int, turn: random.Random) -> dict[str, Any]:
    """Figures of the attack."""
    began = time.monotonic()
    search = stack.enter_context(served(small_output(), "--no-model"))
    box.services[SERVED] = search.command
    pids = {name: service.process.pid for name, service in box.services.items()}
    box.until(lambda: all(" started " in box.services[verb].stderr for verb in ("writer", "producer")))
    written: Counter[str] = Counter()
    runs: dict[Path, dict[str, bytes]] = {}
    wrong: list[str] = []
    asked = 0
    with box.server.client("admin") as admin:
        for name, value in CLIENTS.items():
            admin.config_set(name, value)
    standing: deque[Hostile] = deque()
    with box.server.client("laptop") as laptop, box.server.client("worker") as worker:
        poison_names(laptop)
        box.ask("enqueue", write_victim(box), "-o", box.out / "victim", "-m", f"stub:{DIM}", "--unit-size", "1")
        victim = json.loads((box.out / "victim" / "run.json").read_text())["run"]
        for number in range(records):
            if number % EVERY == 0:
                output = box.out / f"honest-{len(runs)}"
                texts = box.folder / f"{output.name}.jsonl"
                runs[output] = write_texts(texts, SAMPLES)
                model = f"stub:{DIM}?ms_per_sample=5"
                box.ask("enqueue", texts, "-o", output, "-m", model, "--unit-size", str(UNIT))
                for arguments in (["status"], ["status", "--json"], ["status", output]):
                    asked += 1
                    status, said, complained = box.laptop(*arguments)
                    if status:
                        wrong.append(f"{arguments}: {status} {complained or said}"[:500])
            run = json.loads(([*runs][-1] / "run.json").read_text())["run"]
            written[poison(laptop, worker, search.url, run, number, turn)] += 1
            if number % COSTLY_EVERY == 0:
                written[costly(box, laptop, worker, search.url, run, victim, number // COSTLY_EVERY, standing)] += 1
                while len(standing) > STANDING:
                    standing.popleft().socket.close()
        for output in runs:
            box.until(lambda output=output: closed(output))  # type: ignore[misc]
    for output, expected in runs.items():
        check_complete(output, expected, units=SAMPLES // UNIT, dim=DIM)
    for name, service in box.services.items():
        if service.process.poll() is not None or service.process.pid != pids[name]:
            wrong.append(f"{name} ended with status {service.process.poll()}: {service.said[-2_000:]}")
        if (peak := peak_mb(service.process.pid)) > MOST_MB:
            wrong.append(f"{name} took {peak} MB")
        complaint = re.compile(r"^.*worker_died.*$|^ *Traceback.*(?:\n +.*)*(?:\n.*)?", re.MULTILINE)
        wrong += [f"{name}: {found[0]}"[-2_000:] for found in complaint.finditer(service.stderr)]
    return {
        "records": dict(sorted(written.items())),
        "services": sorted(box.services),
        "status_commands": asked,
        "honest_runs_exact": len(runs),
        "skipped": {verb: sum(box.skipped(verb).values()) for verb in ("producer", "writer")},
        "peak_mb": {name: peak_mb(service.process.pid) for name, service in box.services.items()},
        "seconds": round(time.monotonic() - began, 1),
        "wrong": wrong,
    }


def peak_mb(pid: int) -> int:
    """Peak memory of a process and its children together; 0 of one that has ended."""
    with suppress(FileNotFoundError):
        found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
        children = [
            child for task in Path(f"/proc/{pid}/task").glob("*/children") for child in task.read_text().split()
        ]
        return sum(map(peak_mb, map(int, children))) + (int(found[1]) // 1024 if found else 0)
    return 0


def poison(laptop: redis.Redis, worker: redis.Redis, url: str, run: str, number: int, turn: random.Random) -> str:
    """Write one poisoned record; gives the name of its kind."""

    def near(name: str) -> bytes:
        return mutated(turn.choice(borders()[name].seeds), turn)

    evil = f"{number % 50:016x}"
    kinds = {
        "run record, listed": lambda: laptop.hset(RUNS, evil, RECORDS[number % len(RECORDS)]),
        "run record, mutated": lambda: laptop.hset(RUNS, evil, near("run record")),
        "upload, listed": lambda: laptop.hset(UPLOADS, evil, UPLOADS_TEXTS[number % len(UPLOADS_TEXTS)]),
        "upload, mutated": lambda: laptop.hset(UPLOADS, evil, near("upload")),
        "piece of an upload": lambda: laptop.hset(
            upload_key(evil, "pieces"), str(number % 3), near("piece of an upload")
        ),
        "state of an upload": lambda: laptop.hset(upload_key(evil, "state"), mapping=STATES[number % len(STATES)]),  # type: ignore[arg-type]
        "wish of a run": lambda: laptop.hset(run_key(evil, "asked"), mapping=WISHES[number % len(WISHES)]),  # type: ignore[arg-type]
        "report of a service": lambda: (
            worker.zadd(SERVICES, {f"s{evil}": 1e12}),
            worker.set(service_key(f"s{evil}"), near("report of a service"), px=20_000),
        ),
        "report of a worker": lambda: (
            worker.zadd(WORKERS, {f"w{evil}": 1e12}),
            worker.set(worker_key(f"w{evil}"), near("report of a service"), px=20_000),
        ),
        "rate": lambda: worker.hset(RATES, evil, near("rate")),
        "turns": lambda: worker.set(TURNS, near("rate")),
        "entry of the result stream": lambda: worker.xadd(
            run_key(run, "res"), {"u": str(number % 40), "token": "1-0:w:x", "data": near("result")}
        ),
        "fields of the result stream": lambda: worker.xadd(
            run_key(run, "res"), {mutated(b"u", turn) or b"x": near("fields of a result")[:2_000]}
        ),
        "body of a search": lambda: asks(f"{url}/knn-service", near("body of a search")),
        "body of a look-up": lambda: asks(f"{url}/metadata", near("body of a look-up")),
    }
    if number % HUGE_EVERY == 0:
        huge = (
            lambda: laptop.hset(RUNS, evil, HUGE),
            lambda: laptop.hset(UPLOADS, evil, HUGE),
            lambda: laptop.hset(run_key(run, "asked"), "note", HUGE),
            lambda: worker.set(worker_key(f"w{evil}"), HUGE, px=20_000),
            lambda: worker.xadd(run_key(run, "res"), {"u": "0", "token": "1-0:w:x", "data": HUGE}),
        )
        huge[number // HUGE_EVERY % len(huge)]()
        return "huge value"
    name = sorted(kinds)[number % len(kinds)]
    kinds[name]()
    return name


def write_victim(box: Box) -> Path:
    """The input of a run that gets another fingerprint, of which no more is asked than that it harms no other."""
    write_texts(box.folder / "victim.jsonl", 20)
    return box.folder / "victim.jsonl"


def costly(
    box: Box,
    laptop: redis.Redis,
    worker: redis.Redis,
    url: str,
    run: str,
    victim: str,
    number: int,
    standing: deque[Hostile],
) -> str:
    """Make one load that costs its receiver more than its sender; gives the name of its kind."""
    text, round_ = TEXTS[number % len(TEXTS)], number // 6

    def unread() -> None:
        attack = UNREAD[round_ % len(UNREAD)]
        user = ("monitor", "laptop", "worker")[round_ % 3]
        for data in attack(user)[:4]:
            standing.append(Hostile(box.server, user))
            standing[-1].send(data)

    def call() -> None:
        name = ABOUT_UNITS[round_ % len(ABOUT_UNITS)]
        arguments = [NO_UNIT if str(value) == "3" else value for value in ARGUMENTS[name]]
        arguments[round_ % len(arguments)] = hostile(text, 4_000 if round_ % 2 else 400_000)
        script = load_scripts(worker)[name]
        keys = [run_key(run, part) for part in RUN_PARTS]
        with suppress(redis.ResponseError, NotAllowedError):  # refused
            worker.evalsha(script.sha, len(keys), *keys, *arguments)

    def store() -> None:
        worst = hostile(text, 100_000)
        for part in ("busy", "poison", "att", "pub"):
            with suppress(NotAllowedError):
                worker.hset(run_key(run, part), mapping={NO_UNIT: worst, worst: worst})
        for part in ("due", "hinted"):
            with suppress(NotAllowedError):
                worker.zadd(run_key(run, part), {worst: 0})

    def fingerprint() -> None:
        with suppress(NotAllowedError):
            worker.hset(run_key(victim, "meta"), "fingerprint", f"{number:032x}")

    kinds = (
        ("unread replies and unfinished commands", unread),
        ("worst argument of a script", call),
        ("worst stored value of a script", store),
        ("fingerprint of a run", fingerprint),
        ("password that is none, many times", lambda: laptop.hset(RUNS, f"{number % 50:016x}", masked_at_length())),
        ("body of many values", lambda: asks(f"{url}/knn-service", [*BODIES.values()][round_ % len(BODIES)](13 << 20))),
    )
    name, load = kinds[number % len(kinds)]
    load()
    return name


def masked_at_length() -> bytes:
    """A record whose output is to be masked before it is shown."""
    return record_text(output="/" + "://:" * 30_000)


def asks(url: str, body: bytes) -> None:
    """Send a body; an answer of any status is one."""
    with suppress(urllib.error.HTTPError), urllib.request.urlopen(url, data=body, timeout=30) as answer:
        answer.read()


if __name__ == "__main__":
    sys.exit(main())
