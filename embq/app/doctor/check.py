"""Check results of `embq doctor` and `embq worker --check`, and how they are printed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

import click

from embq.core.errors import EmbqError, Exit
from embq.core.redaction import printable


@dataclass(slots=True)
class Check:
    """A row: `state` is "ok", "warn" (works, with a caveat) or "fail"; `fix` is "" for ok."""

    name: str
    state: str
    detail: str
    fix: str = ""

    def __post_init__(self) -> None:
        """Escape what other machines and libraries may have written."""
        self.detail, self.fix = printable(self.detail), "\n".join(map(printable, self.fix.splitlines()))

    @classmethod
    def passed(cls, name: str, detail: str, caveat_fix: str = "") -> Check:
        """A row that is ok, or a warning if there is something to fix."""
        return cls(name, "warn" if caveat_fix else "ok", detail, caveat_fix)

    @classmethod
    def of_error(cls, name: str, error: EmbqError, fix: str = "") -> Check:
        """A failed row with the message of an error, and `fix` if the error has no next step."""
        return cls(name, "fail", error.message, error.next_step or fix)


def guarded(name: str, checks: Iterable[Check], fix: str = "") -> Iterator[Check]:
    """The rows of `checks`, and a failed row for an error in between, with `fix` if the error has no next step."""
    from redis.exceptions import RedisError

    try:
        yield from checks
    except EmbqError as error:
        yield Check.of_error(name, error, fix)
    except RedisError as error:
        yield Check(name, "fail", f"the broker refuses a command: {error}", "allow it to this user (ACL)")
    except OSError as error:
        yield Check(name, "fail", f"{error}", "check permissions and free space")


def print_checks(checks: Iterable[Check], *, as_json: bool) -> Exit:
    """Print each check at once, with its fix below it; or one JSON object at the end.

    Returns the exit status: `Exit.UNAVAILABLE` if a check fails; warnings do not count.
    """
    printed = []
    for check in checks:
        printed.append(check)
        if not as_json:
            click.echo(f"{check.state:<4}  {check.name:<10}  {check.detail}")
            for number, line in enumerate(check.fix.splitlines()):
                click.echo(f"{'':>18}{'fix: ' if number == 0 else '     '}{line}")
    ok = all(check.state != "fail" for check in printed)
    if as_json:
        click.echo(json.dumps({"schema": 1, "ok": ok, "checks": [asdict(check) for check in printed]}))
    return Exit.DONE if ok else Exit.UNAVAILABLE
