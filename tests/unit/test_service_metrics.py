"""The metrics of producer, writer, worker and `embq serve` are those that are documented, and all are told."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Sample
from prometheus_client.core import Metric as Family
from prometheus_client.parser import text_string_to_metric_families

from embq.app.services.service import FRESH_S, Exposition
from embq.app.services.worker_metrics import CounterTotals
from embq.core.errors import UnwellError
from embq.core.service.metrics import (
    EVERY_SERVICE,
    METRICS,
    PRODUCER,
    SERVE,
    WORKER,
    WRITER,
    Histogram,
    Metric,
    MetricSamples,
    Role,
)
from embq.retrieval.serving.metrics import STEPS, Metrics, Steps
from tests.support.fakes.clock import FakeClock

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "metrics.md"
ROLES: tuple[Role, ...] = ("producer", "writer", "worker")
ALL = (*EVERY_SERVICE, *PRODUCER, *WRITER, *WORKER, *SERVE)


def row(metric: Metric) -> str:
    labels = ", ".join(metric.labels)
    return f"| `{metric.name}` | {metric.kind} | {labels} | {metric.meaning} |".replace("|  |", "| |")


def test_the_page_has_every_metric_in_the_order_of_the_table() -> None:
    rows = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| `embq_")]
    assert rows == [row(metric) for metric in ALL]


def test_every_metric_has_one_role_and_a_name_that_says_what_it_is() -> None:
    assert len({metric.name for metric in ALL}) == len(ALL)
    for metric in ALL:
        assert re.fullmatch(r"embq_[a-z_]+", metric.name)
        assert (metric.kind == "counter") == metric.name.endswith("_total")


@pytest.mark.parametrize("role", ROLES)
def test_what_was_read_can_be_scraped(role: Role) -> None:
    readings = MetricSamples(role)
    for metric in METRICS[role]:
        spread = Histogram((0.1, 1.0))
        spread.observe(0.5)
        readings.put(metric.name, spread if metric.kind == "histogram" else 7.0, *metric.labels)
    families = {family.name: family for family in text_string_to_metric_families(readings.text().decode())}
    for metric in METRICS[role]:
        family = families[metric.name.removesuffix("_total")]
        assert (family.type, family.documentation) == (metric.kind, metric.meaning)
        assert set(family.samples[0].labels) - {"le"} == set(metric.labels)
        if metric.kind == "histogram":
            assert [sample.value for sample in family.samples] == [0, 1, 1, 1, 0.5]
        else:
            assert [sample.value for sample in family.samples] == [7.0]


def test_the_text_says_what_prometheus_client_writes_of_the_same_samples() -> None:
    class Same:
        """The samples, as families of that library."""

        def collect(self) -> Iterator[Family]:
            up = GaugeMetricFamily(
                "embq_worker_rows_per_second", "", labels=["worker", "host", "device", "device_name"]
            )
            for labels, value in devices.items():
                up.add_metric(labels, value)
            rows = CounterMetricFamily("embq_run_rows_total", "", labels=["run"])
            rows.add_metric(["r"], 12_345_678_901)
            yield from (up, rows, GaugeMetricFamily("embq_machines", "", value=3))

    odd = ('"', "\\", "\n", '\\n"\\', "", " é{}=,", "\r\t#")
    values = (0.0, -1.5, 1e-9, 1e22, 0.1 + 0.2, float("inf"), 7.0)
    devices = {(name, name * 2, f"a{name}", f"{name}b"): value for name, value in zip(odd, values, strict=True)}
    ours = MetricSamples("producer")
    for labels, value in devices.items():
        ours.put("embq_worker_rows_per_second", value, *labels)
    ours.put("embq_run_rows_total", 12_345_678_901, "r")
    ours.put("embq_machines", 3)

    def parsed(text: bytes) -> dict[str, tuple[str, list[Sample]]]:
        return {one.name: (one.type, one.samples) for one in text_string_to_metric_families(text.decode())}

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Same())
    assert parsed(ours.text()) == parsed(generate_latest(registry))


def test_a_label_that_is_no_text_spoils_no_other_sample() -> None:
    ours = MetricSamples("producer")
    ours.put("embq_workers", 1, "\udc80")
    assert b'embq_workers{model="?"} 1.0' in ours.text()


def test_a_metric_of_another_role_or_without_its_labels_is_a_bug() -> None:
    with pytest.raises(KeyError):
        MetricSamples("writer").put("embq_machines", 1)
    with pytest.raises(ValueError, match="embq_run_units"):
        MetricSamples("producer").put("embq_run_units", 1, "r")


def test_a_distance_is_added_up_over_processes_and_over_their_models() -> None:
    odometer, rows = CounterTotals(), ("embq_slot_rows_total", "cpu")

    def total() -> float:
        readings = MetricSamples("worker")
        odometer.put(readings)
        (family,) = text_string_to_metric_families(readings.text().decode())
        return family.samples[0].value

    odometer.read("a", rows, 100)
    odometer.read("a", rows, 150)
    odometer.read("b", rows, 30)
    assert total() == 180
    odometer.read("a", rows, 20)  # another model, counted from 0
    assert total() == 200
    odometer.keep({"b"})
    odometer.read("c", rows, 5)  # the process in the place of `a`
    odometer.read("b", rows, 31)
    assert total() == 206


def test_a_service_is_read_once_for_all_who_ask_at_about_the_same_time(clock: FakeClock) -> None:
    reads = 0

    def meter(readings: MetricSamples) -> None:
        nonlocal reads
        reads += 1
        readings.put("embq_writer_runs", reads)

    exposition = Exposition("writer", clock=clock)
    exposition.collectors = (meter,)
    first = exposition.text()
    assert b"embq_writer_runs 1.0" in first
    assert exposition.text() == first
    clock.advance(FRESH_S)
    assert b"embq_writer_runs 2.0" in exposition.text()


def test_a_read_that_never_ends_keeps_nobody_waiting_for_ever(clock: FakeClock) -> None:
    """A folder that was mounted over a network and is gone."""
    held, let_go = threading.Event(), threading.Event()

    def meter(_readings: MetricSamples) -> None:
        held.set()
        assert let_go.wait(60)

    exposition = Exposition("writer", clock=clock, patience_s=0.1)
    exposition.collectors = (meter,)
    first = threading.Thread(target=exposition.text)
    first.start()
    assert held.wait(60)
    with pytest.raises(UnwellError, match="still being read"):
        exposition.text()
    let_go.set()
    first.join(60)
    assert not first.is_alive()
    assert b"embq_build_info" in exposition.text()


# --- metrics of `embq serve` ---


def test_every_metric_can_be_scraped() -> None:
    scraped = Metrics().exposition().decode()
    for metric in SERVE:
        name = metric.name.removesuffix("_total") + "_total" if metric.kind == "counter" else metric.name
        assert f"# TYPE {name} {metric.kind}" in scraped


def test_the_summary_says_where_the_time_goes() -> None:
    metrics = Metrics()
    assert metrics.summary() == "No request to /knn-service yet.\n"
    steps = Steps(metrics)
    for name in STEPS:
        with steps.step(name):
            pass
    metrics.histograms["embq_http_request_seconds"].labels("/knn-service").observe(1.0)
    summary = metrics.summary()
    assert summary.startswith("1 requests to /knn-service and /search took 1000.00 ms on average.")
    assert all(re.search(rf"^{name} +1 +\d", summary, re.MULTILINE) for name in STEPS)
    assert list(steps.seconds) == list(STEPS)
    assert steps.server_timing().startswith("fetch;dur=")
