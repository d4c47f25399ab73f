"""Check results of `embq doctor` and `embq worker --check`, and how they are printed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass

import click
from redis.exceptions import RedisError

from core.errors import EmbqError, Exit
from core.redaction import printable


@dataclass(frozen=True, slots=True)
class Check:
    """A row of `embq doctor`: `state` is "ok", "warn" (works, but look at it) or "fail"; `fix` is "" where it is ok."""

    name: str
    state: str
    detail: str
    fix: str = ""


def guarded(name: str, look: Callable[[], list[Check]]) -> Iterator[Check]:
    """The rows of `look`, or one that says why there are none."""
    try:
        yield from look()
    except EmbqError as error:
        yield Check(name, "fail", error.message, error.next_step)
    except RedisError as error:
        yield Check(name, "fail", f"the broker refuses a command: {error}", "allow it to this user (ACL)")
    except OSError as error:
        yield Check(name, "fail", f"{error}", "check permissions and free space")


def print_checks(checks: Iterable[Check], *, as_json: bool) -> Exit:
    """Print each check as soon as it is known, its fix below it; as JSON one object, at the end.

    Gives the exit status: `Exit.UNAVAILABLE` where a check fails; warnings do not count.
    """
    told = []
    for check in checks:
        told.append(check)
        if not as_json:
            click.echo(f"{check.state:<4}  {check.name:<10}  {printable(check.detail)}")
            for number, line in enumerate(check.fix.splitlines()):
                click.echo(f"{'':>18}{'fix: ' if number == 0 else '     '}{printable(line)}")
    ok = all(check.state != "fail" for check in told)
    if as_json:
        click.echo(json.dumps({"schema": 1, "ok": ok, "checks": [asdict(check) for check in told]}))
    return Exit.DONE if ok else Exit.UNAVAILABLE
