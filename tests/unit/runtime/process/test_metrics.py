"""Test the metrics endpoint of a process over HTTP."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter
from support.ports import free_port

from clawstream.runtime.process.metrics import serving_metrics
from clawstream.runtime.process.ports import PortTaken
from clawstream.schemas.settings import Settings


def test_a_process_serves_its_metrics_and_its_disk_while_it_runs(tmp_path: Path) -> None:
    port, registry = free_port(), CollectorRegistry()
    Counter("seen", "Seen", registry=registry).inc(2)
    settings = Settings.model_validate({"data_dir": tmp_path, "metrics": {"port": port}})
    url = f"http://127.0.0.1:{port}/metrics"
    with serving_metrics(settings, "monitor", registry):
        text = httpx.get(url).text
        assert "seen_total 2.0" in text and "process_cpu_seconds_total" in text
        values = dict(line.split() for line in text.splitlines() if not line.startswith("#"))
        free, size = (float(values[f"clawstream_disk_{n}_bytes"]) for n in ("free", "size"))
        assert 0 < free < size
        with pytest.raises(PortTaken, match=r"the metrics of monitor .* metrics\.port"):
            with serving_metrics(settings, "monitor", CollectorRegistry()):
                pass
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)


def test_without_a_port_and_for_other_processes_nothing_is_served(tmp_path: Path) -> None:
    for settings, process in (
        (Settings(data_dir=tmp_path), "lake"),
        (Settings.model_validate({"metrics": {"port": free_port()}}), "gateway"),
    ):
        registry = CollectorRegistry()
        with serving_metrics(settings, process, registry):
            assert not list(registry.collect())
