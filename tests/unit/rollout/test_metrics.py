"""Test the metrics of a rollout worker's report."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from clawstream.rollout.metrics import WorkerMetrics
from clawstream.rollout.status import Report
from clawstream.schemas.settings import Settings


def test_a_scrape_shows_the_current_report() -> None:
    report, registry = Report(Settings(), "http://h:1"), CollectorRegistry()
    registry.register(WorkerMetrics(report))

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"clawstream_rollout_{name}", labels)

    assert value("state", state="starting") == 1 and value("last_load_seconds") is None
    report.loaded("r/1.0", 1500.0)
    report.load_failed("r/1.0", "no file")
    assert value("state", state="ready") == 1 and value("state", state="starting") is None
    assert (value("loads_total"), value("failed_loads_total")) == (1, 1)
    assert value("last_load_seconds") == 1.5
