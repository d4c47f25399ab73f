"""The use of a stack from elsewhere, and what people see of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.compose.engine import Stack, docker, image_of, in_container, network


def notes(folder: Path, rows: int) -> dict[str, bytes]:
    """Write texts that a laptop has; gives what each key's row is computed from."""
    texts = {f"note-{i:05d}": f"what was noted as number {i}" for i in range(rows)}
    lines = (json.dumps({"id": key, "text": text}) for key, text in texts.items())
    folder.mkdir(exist_ok=True)
    (folder / "notes.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return {key: text.encode() for key, text in texts.items()}


@contextmanager
def laptops_network(stack: Stack) -> Iterator[str]:
    """A network on which only the broker is."""
    with network(f"{stack.project}_laptop", "--internal") as name:
        broker = stack.containers("broker")[0]
        docker("network", "connect", "--alias", "broker", name, broker)
        try:
            yield name
        finally:
            docker("network", "disconnect", "--force", name, broker)


def enqueue_and_leave(stack: Stack, inputs: Path, *options: str, status: int = 0) -> str:
    """A laptop's whole visit: its own inputs, its own secret, no folder of the stack; gives what it was told."""
    with laptops_network(stack) as name:
        return in_container(
            "enqueue",
            "/in/notes.jsonl",
            "--inline",
            *options,
            "--json",
            image=image_of("producer"),
            networks=name,
            mounts={inputs: "/in", stack.folder / "secrets" / "laptop": "/run/secrets/embq"},
            environment={
                "EMBQ_BROKER_URL": "redis://laptop@broker:6379",
                "EMBQ_BROKER_PASSWORD_FILE": "/run/secrets/embq/password",
            },
            status=status,
        )


def run_named_in(told: str) -> str:
    """The run in what `embq enqueue --json` has told."""
    return str(json.loads(next(line for line in told.splitlines() if line.startswith("{")))["run"])


def done_units(stack: Stack, run: str) -> int:
    """Committed and published units, 0 while the run is on its way."""
    units = stack.status(run).get("units")
    return 0 if units is None else int(units["done"]) + int(units["received"])


def works(action: Callable[[], object]) -> bool:
    """True if an action gives something and does not fail, for targets that are away or not there yet."""
    try:
        return bool(action())
    except AssertionError:
        return False


def workers_heard_of(stack: Stack) -> list[dict[str, Any]]:
    """The supervisors of workers that `embq status` shows."""
    return [one for one in stack.status()["services"] if one["role"] == "worker"]


def by_worker(tokens: dict[str, str]) -> dict[str, int]:
    """Name of a worker process -> units of it that were committed, by unit id -> token."""
    names = [token.split(":")[1] for token in tokens.values()]
    return {name: names.count(name) for name in sorted(set(names))}
