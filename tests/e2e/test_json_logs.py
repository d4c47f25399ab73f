"""Services with EMBQ_LOG=json: whatever they and their processes say in a run is one object a line."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from embq.core.broker.embedded import EmbeddedServer
from tests.e2e.services import Services
from tests.e2e.session import closed


@pytest.mark.slow
def test_every_line_of_every_service_is_an_object(own_server: EmbeddedServer, short_tmp: Path) -> None:
    root, units = short_tmp / "out", 8
    with ExitStack() as stack:
        services = Services(stack, own_server, workers=1, environment={"EMBQ_LOG": "json"})
        services.enqueue(root, units, model="minilm")  # whose libraries have things to say as well
        services.until(lambda: root.exists() and (root / "_tmp").exists() and closed(root))
        for command in services.services.values():
            command.process.terminate()
        statuses = {verb: command.wait(60) for verb, command in services.services.items()}
        said = {verb: command.stderr for verb, command in services.services.items()}
    assert statuses == dict.fromkeys(statuses, 0)
    lines = [(verb, json.loads(line)) for verb, text in said.items() for line in text.splitlines()]
    assert all(list(line) == ["time", "level", "service", "event", "fields"] for _, line in lines)
    assert {(verb, line["event"]) for verb, line in lines} >= {
        ("worker", "worker_started"),
        ("worker", "model_loaded"),
        ("writer", "run_opened"),
        ("writer", "committed"),
        ("writer", "run_closed"),
    }
    assert sum(line["fields"].get("taken", 0) for _, line in lines if line["event"] == "committed") == units
