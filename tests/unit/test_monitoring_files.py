"""Dashboard, alerts and Prometheus's configuration fit together, and ask for nothing that is not told."""

from __future__ import annotations

import re
import subprocess
from itertools import combinations
from pathlib import Path

import pytest
import yaml

from embq.core.service.metrics import METRICS
from tests.support.servers.monitoring import ALERTS, DASHBOARD, FILES, names_in, needs_prometheus, panels, queries

TOLD = {metric.name for metrics in METRICS.values() for metric in metrics}
PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "deploy" / "monitor.md"


@pytest.mark.parametrize("title", queries())
def test_the_dashboard_asks_only_for_what_is_told(title: str) -> None:
    expression = queries()[title]
    assert names_in(expression) <= TOLD
    assert names_in(expression) or "ALERTS" in expression


@pytest.mark.parametrize("alert", [rule["alert"] for rule in ALERTS])
def test_every_alert_asks_only_for_what_is_told_and_says_what_to_do(alert: str) -> None:
    (rule,) = (rule for rule in ALERTS if rule["alert"] == alert)
    assert names_in(rule["expr"]) <= TOLD
    assert names_in(rule["expr"]) or "up{" in rule["expr"]
    assert set(rule["annotations"]) == {"summary", "action"}
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert f"| `{alert}` |" in PAGE.read_text("utf-8")


def test_every_alert_is_tried() -> None:
    tried = yaml.safe_load((FILES / "alerts_test.yml").read_text("utf-8"))["tests"]
    fired = {one["alertname"] for test in tried for one in test["alert_rule_test"] if one.get("exp_alerts")}
    silent = {one["alertname"] for test in tried for one in test["alert_rule_test"] if not one.get("exp_alerts")}
    assert fired == silent == {rule["alert"] for rule in ALERTS}


@needs_prometheus
@pytest.mark.parametrize(
    "command",
    [["check", "config", "prometheus.yml"], ["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"]],
    ids=" ".join,
)
def test_prometheus_itself_takes_the_files(command: list[str]) -> None:
    done = subprocess.run(["promtool", *command], cwd=FILES, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# --- what Grafana needs of a dashboard ---


def test_panels_have_places_of_their_own_and_one_data_source() -> None:
    (source,) = yaml.safe_load((FILES / "grafana/provisioning/datasources/embq.yml").read_text("utf-8"))["datasources"]
    wanted = {"type": source["type"], "uid": source["uid"]}
    assert DASHBOARD["schemaVersion"] == 39, "Grafana 10.3 wrote it; later ones bring it up to date as they load it"
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    for panel in panels():
        assert panel["type"] in ("stat", "timeseries")
        assert [panel["datasource"], *(target["datasource"] for target in panel["targets"])] == [wanted] * (
            1 + len(panel["targets"])
        )
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        assert panel["title"]
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    assert all(place["x"] >= 0 and place["x"] + place["w"] <= 24 for place in places)
    for one, other in combinations(places, 2):
        apart = (
            one["x"] + one["w"] <= other["x"]
            or other["x"] + other["w"] <= one["x"]
            or one["y"] + one["h"] <= other["y"]
            or other["y"] + other["h"] <= one["y"]
        )
        assert apart, (one, other)


def test_a_run_is_chosen_by_its_name() -> None:
    (variable,) = DASHBOARD["templating"]["list"]
    assert (variable["name"], variable["type"], variable["allValue"]) == ("run", "query", ".*")
    # As `query_result` writes a series: labels in the order of the alphabet, ours between those of the scrape.
    series = (
        'embq_run_info{instance="producer:9101", job="producer", model="m", name="notes", run="a1", state="done"} 1'
    )
    found = re.search(variable["regex"].strip("/").replace("(?<", "(?P<"), series.replace(", ", ","))
    assert found is not None
    assert found.groupdict() == {"text": "notes", "value": "a1"}


def test_provisioning_looks_for_dashboards_where_the_stack_puts_them() -> None:
    (provider,) = yaml.safe_load((FILES / "grafana/provisioning/dashboards/embq.yml").read_text("utf-8"))["providers"]
    assert provider["options"]["path"] == "/etc/embq/dashboards"
