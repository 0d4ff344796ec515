"""Test the alert rules and dashboards: what they query exists, and Prometheus accepts it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.process_collector import ProcessCollector

from clawstream.ops.monitoring.reference import all_metrics, series
from clawstream.schemas.settings import Settings
from clawstream.schemas.settings.up import METRICS_PORTS

ROOT = Path(__file__).parents[3]
MONITORING = ROOT / "infra" / "monitoring"
DASHBOARDS = sorted((MONITORING / "dashboards").glob("*.json"))
PROMTOOL = shutil.which("promtool", path=f"{ROOT}/.cache/promtool/usr/bin") or shutil.which(
    "promtool"
)
OF_PROMETHEUS = {"up", "ALERTS"}
KEYWORDS = {"and", "or", "unless", "by", "on", "bool", "offset"}

needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="make test-alerts downloads promtool")


def read(name: str) -> Any:
    return yaml.safe_load((MONITORING / name).read_text())


def rules() -> list[dict[str, Any]]:
    return [rule for group in read("alerts.yml")["groups"] for rule in group["rules"]]


def panels(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())["panels"]
    return found


def expressions() -> Iterator[str]:
    yield from (rule["expr"] for rule in rules())
    for path in DASHBOARDS:
        yield from (t["expr"] for panel in panels(path) for t in panel.get("targets", ()))


def queried(expression: str) -> set[str]:
    """Return the metrics of an expression: the names that are no function, label or keyword."""
    bare = re.sub(r'"[^"]*"|\{[^}]*\}|\[[^\]]*\]|\b(?:by|on)\s*\([^)]*\)', " ", expression)
    names = re.findall(r"[A-Za-z_:][\w:]*(?!\w*\s*\()", bare)
    return {n for n in names if not re.search(rf"\b{n}\s*\(", bare)} - KEYWORDS


def test_every_metric_that_is_queried_exists() -> None:
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    of_process = {sample.name for metric in registry.collect() for sample in metric.samples}
    known = series(all_metrics()) | of_process | OF_PROMETHEUS
    missing = {e: queried(e) - known for e in expressions() if queried(e) - known}
    assert missing == {} and all(queried(e) for e in expressions())


def test_panels_and_dashboards_have_ids_of_their_own() -> None:
    (source,) = read("grafana/datasources/prometheus.yml")["datasources"]
    for path in DASHBOARDS:
        ids = Counter(panel["id"] for panel in panels(path))
        assert max(ids.values()) == 1, path
        for panel in panels(path):
            if panel["type"] != "row":
                assert panel["datasource"]["uid"] == source["uid"]
                assert panel["title"] and panel["description"] and panel["targets"]
    assert len({json.loads(p.read_text())["uid"] for p in DASHBOARDS}) == len(DASHBOARDS) == 2


def test_every_alert_says_what_to_do_and_has_a_test() -> None:
    tests = (MONITORING / "alerts_test.yml").read_text()
    for rule in rules():
        assert rule["annotations"].keys() == {"summary", "action"}
        assert rule["labels"]["severity"] in ("critical", "warning")
        name = rule["alert"]
        assert f'"{name}"' in tests or f"alertname: {name}\n" in tests, name


def test_the_targets_are_the_ports_of_the_containers() -> None:
    given = Settings.model_validate(yaml.safe_load((ROOT / "infra/settings.yaml").read_text()))
    ports = {}
    for job in read("prometheus.yml")["scrape_configs"]:
        if "static_configs" in job:
            ((target,),) = (c["targets"] for c in job["static_configs"])
            host, _, port = target.partition(":")
            ports[job["job_name"]] = host, int(port)
        else:
            ((name,),) = (c["names"] for c in job["dns_sd_configs"])
            ports[job["job_name"]] = name, job["dns_sd_configs"][0]["port"]
    assert ports.pop("gateway") == ("gateway", given.gateway.port)
    assert ports.pop("inspector") == ("inspector", 8300)
    assert ports.pop("vllm") == ("rollout", given.rollout.port)
    assert ports == {p: (p, given.metrics.port_of(p)) for p in METRICS_PORTS}
    services = yaml.safe_load((ROOT / "infra/docker-compose.yml").read_text())["services"]
    for name in ("prometheus", "grafana", "jaeger", "kafbat"):
        assert re.search(r":v?\d+\.\d+\.\d+$", services[name]["image"]), name
    assert {*METRICS_PORTS, "gateway"} <= services.keys()


@needs_promtool
@pytest.mark.slow
def test_prometheus_accepts_every_expression_and_the_alerts_fire(tmp_path: Path) -> None:
    assert PROMTOOL is not None
    recorded = [
        {"record": f"r{i}", "expr": e.replace("$__rate_interval", "1m")}
        for i, e in enumerate(expressions())
    ]
    (tmp_path / "rules.yml").write_text(
        yaml.safe_dump({"groups": [{"name": "all", "rules": recorded}]})
    )
    for words in (
        ("check", "rules", tmp_path / "rules.yml"),
        ("check", "config", MONITORING / "prometheus.yml"),
        ("test", "rules", MONITORING / "alerts_test.yml"),
    ):
        done = subprocess.run(
            [PROMTOOL, *map(str, words)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
