"""Check results of `embq doctor` and `embq worker --check`, and how they are printed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass

import click
from redis.exceptions import RedisError

from embq.core.errors import EmbqError, Exit
from embq.core.redaction import printable


@dataclass(frozen=True, slots=True)
class Check:
    """A row: `state` is "ok", "warn" (works, with a caveat) or "fail"; `fix` is "" for ok."""

    name: str
    state: str
    detail: str
    fix: str = ""


def guarded(name: str, look: Callable[[], list[Check]]) -> Iterator[Check]:
    """The rows of `look`, or a failed row for its error."""
    try:
        yield from look()
    except EmbqError as error:
        yield Check(name, "fail", error.message, error.next_step)
    except RedisError as error:
        yield Check(name, "fail", f"the broker refuses a command: {error}", "allow it to this user (ACL)")
    except OSError as error:
        yield Check(name, "fail", f"{error}", "check permissions and free space")


def print_checks(checks: Iterable[Check], *, as_json: bool) -> Exit:
    """Print each check at once, with its fix below it; or one JSON object at the end.

    Gives the exit status: `Exit.UNAVAILABLE` if a check fails; warnings do not count.
    """
    printed = []
    for check in checks:
        printed.append(check)
        if not as_json:
            click.echo(f"{check.state:<4}  {check.name:<10}  {printable(check.detail)}")
            for number, line in enumerate(check.fix.splitlines()):
                click.echo(f"{'':>18}{'fix: ' if number == 0 else '     '}{printable(line)}")
    ok = all(check.state != "fail" for check in printed)
    if as_json:
        click.echo(json.dumps({"schema": 1, "ok": ok, "checks": [asdict(check) for check in printed]}))
    return Exit.DONE if ok else Exit.UNAVAILABLE
