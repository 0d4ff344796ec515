"""Test what the monitor shows, and that the page lists every metric."""

from __future__ import annotations

from dataclasses import replace

from prometheus_client import CollectorRegistry

from clawstream.ops.lag import Backlog
from clawstream.ops.monitoring.exporter import MonitorMetrics, lag_values, process_values
from clawstream.ops.monitoring.reference import BEGIN, PAGE, all_metrics, page, series
from clawstream.ops.preflight import ports
from clawstream.ops.up import COMMANDS, instances, wanted
from clawstream.schemas.settings import Settings
from clawstream.schemas.settings.up import METRICS_PORTS

READ = Backlog("claw-lake", "claw.steps", 0, 4, 1, 7, True, None, 2, True, 1_000, "ok")


def test_a_poll_shows_the_lag_of_each_partition_and_one_status_of_each_consumer() -> None:
    never = replace(
        READ, partition=1, position=1, committed=False, oldest_ms=None, status="stalled"
    )
    foreign = replace(READ, group="claw-by-hand", status=None)
    metrics, registry = MonitorMetrics(), CollectorRegistry()
    registry.register(metrics)
    metrics.show(lag_values([READ, never, foreign], now_s=11.0))

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, labels)

    at = {"consumergroup": "claw-lake", "topic": "claw.steps"}
    first, second = {**at, "partition": "0"}, {**at, "partition": "1"}
    assert value("kafka_consumergroup_lag", **first) == 3
    assert value("kafka_consumergroup_lag", **second) == 6
    assert value("kafka_consumergroup_current_offset", **first) == 4
    assert value("kafka_consumergroup_current_offset", **second) is None
    assert value("clawstream_consumergroup_lag_records", **first) == 2
    assert value("clawstream_consumergroup_lag_seconds", **first) == 10
    assert value("clawstream_consumergroup_lag_seconds", **second) == 0
    assert value("kafka_topic_partition_current_offset", topic="claw.steps", partition="0") == 7
    assert value("kafka_topic_partition_oldest_offset", topic="claw.steps", partition="0") == 1
    statuses = {
        s: value("clawstream_consumergroup_status", **at, status=s) for s in ("ok", "stalled")
    }
    assert statuses == {"ok": 0, "stalled": 1}
    foreign_at = {**at, "consumergroup": "claw-by-hand"}
    assert value("clawstream_consumergroup_status", **foreign_at, status="ok") is None
    metrics.show([])
    assert value("kafka_consumergroup_lag", **first) is None


def test_processes_of_the_supervisor() -> None:
    rows = {
        "lake": {"state": "running", "ready": True, "restarts": 0},
        "admit": {"state": "restarting", "ready": False, "restarts": 3},
        "trainer": {"state": "done", "ready": False, "restarts": 0},
        "gateway": {"state": "stopped", "ready": False, "restarts": 0},
    }
    metrics, registry = MonitorMetrics(), CollectorRegistry()
    registry.register(metrics)
    metrics.show(process_values(rows))
    assert [
        registry.get_sample_value(f"clawstream_process_{name}", {"process": "admit"})
        for name in ("up", "ready", "restarts_total")
    ] == [0, 0, 3]
    assert registry.get_sample_value("clawstream_process_up", {"process": "lake"}) == 1
    for ended in ("trainer", "gateway"):
        assert registry.get_sample_value("clawstream_process_up", {"process": ended}) is None


def test_the_page_lists_every_metric() -> None:
    """To mend it: python -m clawstream.ops.monitoring.reference."""
    assert PAGE.read_text().partition(BEGIN)[1:] == (BEGIN, page().removeprefix(BEGIN))
    names = [m.name for part in all_metrics().values() for m in part]
    assert len(names) == len(set(names)) and all(m.text for p in all_metrics().values() for m in p)
    assert {
        "clawstream_gateway_call_seconds_bucket",
        "clawstream_admit_refused_groups_total",
    } <= series(all_metrics())


def test_every_process_has_a_port_of_its_own() -> None:
    settings = Settings.model_validate(
        {"metrics": {"port": 9400}, "rollout": {"workers": 2, "model_path": "/m"}}
    )
    assert set(METRICS_PORTS) == COMMANDS.keys() - {"broker", "gateway"}
    assert "monitor" in wanted(settings) and "monitor" not in wanted(Settings())
    taken = [port for _, _, port, name in ports(settings, [*COMMANDS]) if name == "metrics.port"]
    assert sorted(taken) == list(range(9400, 9410))
    workers = instances(settings, "rollout").values()
    assert [w.metrics.port_of("rollout") for w in workers] == [9408, 9409]
    assert not [p for p in ports(Settings(), [*COMMANDS]) if p[3] == "metrics.port"]
