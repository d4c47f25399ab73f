"""The files of deploy/monitoring, and a real Prometheus over services that a test has started."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from embq.core.process.children import die_with_parent
from tests.support.waiting import wait_until

FILES = Path(__file__).resolve().parents[3] / "deploy" / "monitoring"
DASHBOARD: dict[str, Any] = json.loads((FILES / "grafana" / "dashboards" / "embq.json").read_text("utf-8"))
ALERTS: list[dict[str, Any]] = yaml.safe_load((FILES / "alerts.yml").read_text("utf-8"))["groups"][0]["rules"]

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None, reason="no Prometheus on PATH"
)


def panels() -> list[dict[str, Any]]:
    """The panels that ask something."""
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def queries() -> dict[str, str]:
    """Expressions of the dashboard, their variables filled in: title of the panel and legend -> expression."""
    return {
        f"{panel['title']} {target['legendFormat']}".strip(): target["expr"].replace("$run", ".*")
        for panel in panels()
        for target in panel["targets"]
    }


def names_in(expression: str) -> set[str]:
    """The metrics of embq that an expression asks for."""
    found = re.findall(r"\bembq_[a-z_]+\b", expression)
    return {re.sub(r"_(bucket|count|sum)$", "", name) if "_seconds_" in name else name for name in found}


class Prometheus:
    """One that runs.

    Args:
        url: of its API.
    """

    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, path: str, **parameters: str | float) -> Any:
        """The data of an answer."""
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=10) as answer:
            return json.load(answer)["data"]

    def series(self, expression: str, start: float, end: float, step_s: float = 1.0) -> list[dict[str, Any]]:
        """Values of an expression over a time, by series."""
        found = self.ask("query_range", query=expression, start=start, end=end, step=step_s)["result"]
        assert isinstance(found, list)
        return found

    def scrapes(self, job: str) -> bool:
        """True where the last scrape of a job went well."""
        targets = self.ask("targets")["activeTargets"]
        return any(one["labels"]["job"] == job and one["health"] == "up" for one in targets)


@contextmanager
def prometheus(folder: Path, targets: Mapping[str, str]) -> Iterator[Prometheus]:
    """Prometheus with our configuration, but for where the services are.

    Args:
        targets: job -> HOST:PORT.
    """
    settings = yaml.safe_load((FILES / "prometheus.yml").read_text("utf-8"))
    settings["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    settings["rule_files"] = [str(FILES / "alerts.yml")]
    jobs = {job["job_name"] for job in settings["scrape_configs"]}
    assert jobs == set(targets)
    settings["scrape_configs"] = [
        {"job_name": job, "static_configs": [{"targets": [target]}]} for job, target in targets.items()
    ]
    folder.mkdir()
    (folder / "prometheus.yml").write_text(yaml.safe_dump(settings), "utf-8")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                *("prometheus", f"--config.file={folder / 'prometheus.yml'}"),
                *(f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{port}"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            process_group=0,
            preexec_fn=die_with_parent,
        )
    server = Prometheus(f"http://127.0.0.1:{port}")

    def ready() -> bool:
        assert process.poll() is None, (folder / "log").read_text()
        try:
            with urllib.request.urlopen(f"{server.url}/-/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    try:
        wait_until(ready)
        yield server
    finally:
        process.terminate()
        process.wait(30)
