"""Rows of checks on stdout: as text for people, or as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict

import click

from core.errors import Exit
from core.redaction import printable
from embq.verification.findings import Check


def tell(checks: Iterable[Check], *, as_json: bool) -> Exit:
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
