"""The sinks of the metrics, each read back in the form that its users read."""

from __future__ import annotations

import errno
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from structlog.testing import capture_logs
from tensorboardX.proto.event_pb2 import Event

from clawstream.schemas.records import WeightVersion
from clawstream.schemas.settings import Settings
from clawstream.trainer.metrics.definitions import METRICS
from clawstream.trainer.metrics.monitor import Monitor
from clawstream.trainer.metrics.prometheus import VersionMetrics
from clawstream.trainer.metrics.validation import Validation

VALIDATION = Validation(sync_index=1, trajectories=4, mean=0.5, interval=0.25)


def version(sync_index: int, **metrics: float) -> WeightVersion:
    return WeightVersion(
        version_id=f"r/{sync_index}.0", run_id="r", sync_index=sync_index, attempt=0,
        format="full", files=(), channel="train", metrics=metrics, created_at=0,
    )  # fmt: skip


def scalars(folder: Path) -> list[tuple[str, int, float]]:
    """Read TensorBoard's records: length, its checksum, the event, its checksum."""
    found = []
    for file in sorted(folder.iterdir()):
        data, at = file.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            event = Event.FromString(data[at + 12 : at + 12 + length])
            found += [(v.tag, event.step, v.simple_value) for v in event.summary.value]
            at += 16 + length
    return found


def shown(metrics: VersionMetrics) -> list[str]:
    """Return the lines of a scrape without comments."""
    registry = CollectorRegistry()
    registry.register(metrics)
    lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if not line.startswith("#")]


def test_every_new_version_is_on_the_endpoint_and_in_the_event_files(tmp_path: Path) -> None:
    settings = Settings.model_validate(
        {"run_id": "r", "data_dir": tmp_path, "trainer": {"tensorboard_dir": tmp_path / "tb"}}
    )
    prometheus = VersionMetrics()
    monitor = Monitor(settings, shown=1, next_sync_index=1, prometheus=prometheus)
    log = [version(0, loss=9.0), version(1, loss=2.0, tokens=8.0)]
    monitor.versions(log)
    log.append(version(2, loss=1.0, tokens=4.0))
    monitor.versions(log)
    monitor.versions(log)
    monitor.validation(VALIDATION)
    values = dict(line.rsplit(" ", 1) for line in shown(prometheus))
    assert {n.removeprefix("clawstream_trainer_"): float(v) for n, v in values.items()}.items() >= {
        "sync_index": 2.0, "loss": 1.0, "tokens_total": 12.0,
        "val_sync_index": 1.0, "val_reward_mean": 0.5, "val_reward_interval": 0.25,
    }.items()  # fmt: skip
    monitor.close([])
    assert scalars(tmp_path / "tb" / "r") == [
        ("optimizer/loss", 1, 2.0), ("data/tokens", 1, 8.0),
        ("optimizer/loss", 2, 1.0), ("data/tokens", 2, 4.0),
        ("val/reward_mean", 1, 0.5), ("val/trajectories", 1, 4.0), ("val/reward_interval", 1, 0.25),
    ]  # fmt: skip


def test_a_restart_does_not_repeat_the_validations_in_the_event_files(tmp_path: Path) -> None:
    settings = Settings.model_validate(
        {"run_id": "r", "data_dir": tmp_path, "trainer": {"tensorboard_dir": tmp_path / "tb"}}
    )
    later = replace(VALIDATION, sync_index=2)
    for next_sync_index in (1, 2):  # the second trainer resumes before version 2
        monitor = Monitor(settings, shown=0, next_sync_index=next_sync_index)
        monitor.validation(VALIDATION)
        monitor.validation(later)
        monitor.close([])
        (file,) = (tmp_path / "tb" / "r").glob("events.out*")  # of this process and second
        file.rename(file.with_name(f"events.{next_sync_index}"))
    changed = Monitor(settings, shown=0, next_sync_index=3)
    changed.validation(VALIDATION)
    changed.validation(replace(later, mean=1.0))
    changed.close([])
    points = scalars(tmp_path / "tb" / "r")
    assert [(step, value) for tag, step, value in points if tag == "val/reward_mean"] == [
        (1, 0.5), (2, 0.5), (2, 0.5), (2, 1.0),
    ]  # fmt: skip


class FullDisk:
    """A sink that has no space left."""

    def write(self, sync_index: int, metrics: Mapping[str, float]) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    def close(self) -> None:
        """Do nothing."""


def test_a_sink_that_fails_is_left_out_and_the_trainer_goes_on(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    settings = Settings.model_validate(
        {"run_id": "r", "data_dir": tmp_path, "trainer": {"tensorboard_dir": tmp_path / "file"}}
    )
    with capture_logs() as logs:
        monitor = Monitor(settings, shown=0, next_sync_index=1)
        monitor._sinks.append(FullDisk())
        monitor.versions([version(1, loss=2.0), version(2, loss=1.0)])
        monitor.close([])
    assert [(line["event"], line["sink"]) for line in logs] == [
        ("metrics_not_shown", "TensorBoardFiles"),
        ("metrics_not_shown", "FullDisk"),
    ]


def test_the_endpoint_has_gauges_of_the_newest_version_only_and_a_label_for_environments() -> None:
    endpoint = VersionMetrics()
    endpoint.write(6, {"loss": 3.0, "entropy": 1.0, "tokens": 5.0})
    endpoint.write(6, VALIDATION.metrics)
    environments = {"environment/math/reward_mean": 0.5, "environment/a/b/reward_mean": 1.5}
    endpoint.write(7, {"loss": 2.0, **environments, "tokens": 1.0})
    assert shown(endpoint) == [
        "clawstream_trainer_sync_index 7.0",
        "clawstream_trainer_val_sync_index 6.0",
        "clawstream_trainer_tokens_total 6.0",
        "clawstream_trainer_loss 2.0",
        'clawstream_trainer_environment_reward_mean{environment="math"} 0.5',
        'clawstream_trainer_environment_reward_mean{environment="a/b"} 1.5',
        "clawstream_trainer_val_reward_mean 0.5",
        "clawstream_trainer_val_trajectories 4.0",
        "clawstream_trainer_val_reward_interval 0.25",
    ]


def test_every_metric_that_is_shown_is_described() -> None:
    metrics = VersionMetrics()
    metrics.write(1, {name.replace("<name>", "math"): 1.0 for name in METRICS})
    metrics.write(1, VALIDATION.metrics)
    assert {(m.name, m.type, m.documentation) for m in metrics.collect()} <= {
        (m.name, m.type, m.documentation) for m in metrics.describe()
    }
