"""A real Prometheus scrapes real services at work, and every question of the dashboard has an answer."""

from __future__ import annotations

import re
import time
from contextlib import ExitStack
from pathlib import Path

from embq.core.broker.embedded import EmbeddedServer
from tests.e2e.served import served
from tests.e2e.services import Services
from tests.e2e.session import closed
from tests.support.outputs.build import build, write_jsonl
from tests.support.outputs.index import build_index
from tests.support.servers.monitoring import ALERTS, names_in, needs_prometheus, prometheus, queries
from tests.support.waiting import wait_until

UNITS = 300
"""About six seconds for two processes, in which the end of the run can be predicted."""


def on_gpus_only(expression: str) -> bool:
    return any(name.startswith("embq_gpu_") for name in names_in(expression))


@needs_prometheus
def test_every_question_of_the_dashboard_has_an_answer(own_server: EmbeddedServer, short_tmp: Path) -> None:
    lines: list[object] = [{"id": f"k{i}", "text": f"text {i}"} for i in range(60)]
    docs = build(short_tmp / "docs", [write_jsonl(short_tmp / "d.jsonl", lines)], model="stub:4")
    build_index(docs, output="text")
    with ExitStack() as stack:
        search = stack.enter_context(served(docs))
        services = Services(stack, own_server, environment={"EMBQ_METRICS": "0"})
        targets = {"serve": search.url.removeprefix("http://")}
        for verb, command in services.services.items():
            services.until(lambda command=command: "metrics_served" in command.stderr)  # type: ignore[misc]
            found = re.search(r"metrics_served url=http://(\S+)/metrics", command.stderr)
            assert found is not None
            targets[verb] = found[1]
        server = stack.enter_context(prometheus(short_tmp / "prometheus", targets))
        began = time.time()
        for job in targets:
            wait_until(lambda job=job: server.scrapes(job))  # type: ignore[misc]
        services.enqueue(short_tmp / "notes", UNITS)
        for _ in range(3):
            search.knn(text="text 3", num_images=3)
        services.until(lambda: closed(short_tmp / "notes"))

        def unanswered() -> list[str]:
            return [
                title
                for title, expression in queries().items()
                if not on_gpus_only(expression) and not server.series(expression, began, time.time())
            ]

        try:
            wait_until(lambda: not unanswered(), deadline_s=30)
        except AssertionError as error:
            raise AssertionError(f"no answer to {unanswered()}; {services.services['producer'].said}") from error

        def last(metric: str) -> float:
            (series,) = server.series(metric, began, time.time())
            return float(series["values"][-1][1])

        # The workers may have done a unit twice at the end, and signed off before their last second was read.
        rows = 5 * UNITS
        wait_until(lambda: last("embq_run_rows_total") == last("embq_writer_rows_total") == rows)
        assert 0.5 * rows < last("embq_slot_rows_total") < 1.1 * rows
        rules = server.ask("rules")["groups"][0]["rules"]
        assert {(rule["name"], rule["health"]) for rule in rules} == {(rule["alert"], "ok") for rule in ALERTS}
        assert [alert for alert in server.ask("alerts")["alerts"] if alert["state"] == "firing"] == []
