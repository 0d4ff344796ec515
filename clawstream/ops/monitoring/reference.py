"""The list of all metrics, for docs/metrics.md: `python -m clawstream.ops.monitoring.reference`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

from clawstream.gateway.metrics import Metrics
from clawstream.inspector.metrics import PageMetrics
from clawstream.ops.monitoring.exporter import MonitorMetrics
from clawstream.ops.tracing.metrics import TraceMetrics
from clawstream.rollout.metrics import WorkerMetrics
from clawstream.rollout.status import Report
from clawstream.runtime.process.metrics import DiskSpace
from clawstream.schemas.settings import Settings
from clawstream.stream_jobs.admit.decisions.metrics import DecisionMetrics
from clawstream.stream_jobs.lake.metrics import LakeMetrics
from clawstream.stream_jobs.worker.metrics import JobMetrics
from clawstream.trainer.metrics.prometheus import VersionMetrics

PAGE = Path(__file__).resolve().parents[3] / "docs" / "metrics.md"
BEGIN = "<!-- The rest is generated: python -m clawstream.ops.monitoring.reference -->"


@dataclass(frozen=True, slots=True)
class Described:
    """One metric. name: As Prometheus stores it, without the suffixes of histograms."""

    name: str
    kind: str
    labels: Sequence[str]
    text: str


def all_metrics() -> Mapping[str, Sequence[Described]]:
    """Return the metrics by the processes that have them."""
    return {
        "monitor": _described(MonitorMetrics()),
        "every process": _described(DiskSpace(Path())),
        "gateway": _of_registry(Metrics().registry),
        "assemble, reward and compare": _of_registry(JobMetrics().registry),
        "admit": _of_registry(DecisionMetrics(()).registry),
        "lake": _of_registry(LakeMetrics().registry),
        "traces": _of_registry(TraceMetrics().registry),
        "trainer": _described(VersionMetrics()),
        "inspector": _of_registry(PageMetrics().registry),
        "rollout": _described(WorkerMetrics(Report(Settings(), ""))),
    }


def series(metrics: Mapping[str, Sequence[Described]]) -> frozenset[str]:
    """Return the names of all time series, those of histograms with their suffixes."""
    suffixes = {"histogram": ("_bucket", "_sum", "_count")}
    return frozenset(
        m.name + suffix
        for part in metrics.values()
        for m in part
        for suffix in suffixes.get(m.kind, ("",))
    )


def _of_registry(registry: CollectorRegistry) -> list[Described]:
    return [d for collector in registry._collector_to_names for d in _described(collector)]


def _described(collector: Collector) -> list[Described]:
    found: Iterator[Metric] = iter(getattr(collector, "describe", collector.collect)())
    labels = getattr(collector, "_labelnames", None)
    return [
        Described(
            m.name + ("_total" if m.type == "counter" else ""),
            m.type,
            tuple(labels if isinstance(collector, MetricWrapperBase) else m._labelnames),  # type: ignore[arg-type, attr-defined]
            m.documentation,
        )
        for m in found
    ]


def page() -> str:
    """Return the generated part of docs/metrics.md."""
    lines = [BEGIN]
    for process, metrics in all_metrics().items():
        lines += ["", f"## Metrics of {process}", "", "| metric | kind | meaning |"]
        lines.append("| --- | --- | --- |")
        for m in metrics:
            labels = f"{{{','.join(m.labels)}}}" if m.labels else ""
            text = m.text.replace("|", "\\|")
            lines.append(f"| `{m.name}{labels}` | {m.kind} | {text} |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Write the generated part of the page."""
    written = PAGE.read_text().partition(BEGIN)[0]
    PAGE.write_text(written + page())
    sys.stdout.write(f"{PAGE}\n")


if __name__ == "__main__":
    main()
