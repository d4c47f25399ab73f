"""State and priority of a run, which a user may change while it goes on.

The file `control.json` in the output folder is the truth. It is written when the run is made, and from then on by the
run's writer alone; the broker holds a copy, and the requested changes that are not in the file yet.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from embq.core import wire
from embq.core.errors import MalformedError, OutputError
from embq.core.run.layout import Layout
from embq.core.storage.beneath import read_bytes
from embq.core.storage.durable import denied, overwrite, writing

SCHEMA = 1
MOST_BYTES = 4_096
PRIORITY, LEAST_PRIORITY, MOST_PRIORITY = 10, 1, 100


class RunState(StrEnum):
    """State of a run, in the order in which runs are listed.

    `control.json` holds RUNNING, PAUSED (units in flight are finished, no other is started) or CANCELLED; the broker
    holds DONE too. The others are shown: a session of `embq run` that ends early has FINISHING; a run that should run
    and has no worker LOADING while one loads its model, STARTING while one starts or waits for its first unit, else
    STOPPED. ABSENT is the state of a run without a queue in the broker.
    """

    RUNNING = "running"
    FINISHING = "finishing"
    LOADING = "loading"
    STARTING = "starting"
    STOPPED = "stopped"
    PAUSED = "paused"
    CANCELLED = "cancelled"
    DONE = "done"
    ABSENT = ""

    @classmethod
    def read(cls, raw: bytes | str | None) -> RunState:
        """The state in a field of the broker; ABSENT for None and for what is no state."""
        text = raw.decode(errors="replace") if isinstance(raw, bytes) else raw
        return next((state for state in cls if state == text), cls.ABSENT)

    @property
    def ended(self) -> bool:
        """True if no unit is started any more."""
        return self in (RunState.DONE, RunState.CANCELLED)


VERBS = {"pause": RunState.PAUSED, "resume": RunState.RUNNING, "cancel": RunState.CANCELLED}
"""Command of a user -> the state that it requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """State and priority of a run.

    Attributes:
        state: a state that a user may request, see `VERBS`. A run in any state may be set running again.
        priority: its weight where several runs share the devices, 1 to 100.
    """

    state: RunState = RunState.RUNNING
    priority: int = PRIORITY

    def fields(self) -> dict[str, str]:
        """Fields as the broker has them."""
        return {"state": self.state, "priority": str(self.priority)}

    def with_changes(self, changes: Mapping[str, str]) -> Control:
        """This with changes; invalid ones are ignored."""
        state, priority = changes.get("state", ""), changes.get("priority", "")
        return replace(
            self,
            state=RunState(state) if is_valid_change("state", state) else self.state,
            priority=int(priority) if is_valid_change("priority", priority) else self.priority,
        )


def requested_changes(raw: Mapping[bytes, bytes]) -> dict[str, str]:
    """The valid changes in the hash `asked` of a run."""
    changes = {name.decode(errors="replace"): value.decode(errors="replace") for name, value in raw.items()}
    return {name: value for name, value in changes.items() if is_valid_change(name, value)}


def is_valid_change(name: str, value: str) -> bool:
    """True if a user may set `name` to `value`."""
    if name == "state":
        return value in VERBS.values()
    number = re.fullmatch(r"[0-9]{1,3}", value)
    return name == "priority" and number is not None and LEAST_PRIORITY <= int(value) <= MOST_PRIORITY


def load_control(layout: Layout) -> Control:
    """State and priority of the run in a folder; OutputError if the file is damaged."""
    try:
        raw = read_bytes(layout.root, layout.control.name, most_bytes=MOST_BYTES)
        data = wire.read(dict[str, Any], raw, what=str(layout.control), most_bytes=MOST_BYTES)
        if data["schema"] != SCHEMA:
            raise OutputError(
                f"{layout.control} has schema {data['schema']}, this embq reads {SCHEMA}",
                next_step="use the embq version that made the run",
            )
        return Control().with_changes({"state": str(data["state"]), "priority": str(data["priority"])})
    except FileNotFoundError:
        return Control()
    except OSError as error:  # the file may be sound, and say that the run is paused
        raise denied(error, layout.control) or OutputError(
            f"{layout.control} cannot be read: {error.strerror}"
        ) from error
    except (MalformedError, KeyError) as error:
        raise OutputError(
            f"{layout.control} cannot be read: {error}",
            next_step="remove it; the run then goes on with the default priority",
        ) from error


def save_control(layout: Layout, control: Control) -> None:
    """Write it, durably, in place of what was there."""
    data = json.dumps({"schema": SCHEMA, "state": control.state, "priority": control.priority}) + "\n"
    temporary = layout.temporary / f"control.{secrets.token_hex(4)}.json"
    with writing(layout.control):
        overwrite(layout.control, data.encode(), temporary=temporary)
