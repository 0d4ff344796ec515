"""The broker loses its data while the lake and the checkpoints keep theirs.

The broker is wiped or restored from an older copy. No data is lost silently.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.feed import POLICY, Feed
from support.ports import free_port
from support.up import Up, call, up

from clawstream.runtime.exit_codes import EXIT_SOURCE
from clawstream.runtime.process.config import overrides_of
from clawstream.schemas.settings import Settings


@pytest.fixture
def installation(tmp_path: Path, model_dir: Path) -> Settings:
    """Settings with a separate broker."""
    return Settings.model_validate(
        {
            "run_id": "wiped",
            "data_dir": tmp_path / "data",
            "kafka": {"partitions": 2},
            "broker": {"port": free_port()},
            "admit": {"channels": ["train"], "policy": POLICY},
            "trainer": {"model_path": model_dir, "device": "cpu", "keep_checkpoints": 5},
            "lake": {"flush_interval_s": 0.2},
            "up": {"processes": ["broker", "assemble", "admit", "lake", "trainer"]},
        }
    )


@contextmanager
def feed_of(running: Up) -> Iterator[Feed]:
    running.until(lambda: running.state("trainer") == "running", "Kafka is there")
    feed = Feed(running.settings)
    yield feed
    feed.close()


def a_life(settings: Settings, group: str, ids: list[str], steps: int) -> list[str]:
    """Start the processes, feed a group, wait for the versions `ids` and all rows, stop.

    Returns:
        The ids of the written steps.
    """
    with up(settings) as running, feed_of(running) as feed:
        feed.group(group)
        running.until(lambda: feed.ids() == ids, f"versions {ids}")
        running.until(
            lambda: len(feed.column("steps", "step_id")) == steps, f"{steps} steps in the lake"
        )
        running.stop()
        assert {row["restarts"] for row in running.table.values()} == {0}
        return feed.steps


def test_a_wiped_broker_is_a_new_start(installation: Settings) -> None:
    """Topic ids change and all positions start again.

    The lake, weights and checkpoints keep their content, and no id is used twice.
    """
    home = installation.data_dir
    steps = a_life(installation, "one", ["0.0", "1.0"], 2)
    shutil.rmtree(home / "broker")
    with up(installation) as running, feed_of(running) as feed:
        feed.group("two")
        running.until(lambda: feed.ids() == ["0.1", "1.1"], "a new chain, no id used twice")
        running.until(lambda: len(feed.column("steps", "step_id")) == 4, "old and new rows")
        running.until(
            lambda: len(feed.column("weights", "version_id")) == 4, "old and new versions"
        )
        running.until(
            lambda: len(set(feed.column("batches", "kafka_topic_id"))) == 2, "old and new batches"
        )
        running.until_says("lake", "topic_recreated")
        running.until_says("trainer", "weights_of_another_log")
        told = call("status", "--positions", *overrides_of(installation))
        assert told.returncode == 0, told.stdout + told.stderr
        assert "topic recreated" in told.stdout and "beyond" not in told.stdout
        running.stop()
        steps += feed.steps
    assert sorted(feed.column("steps", "step_id")) == sorted(steps)
    assert sorted(feed.column("weights", "version_id")) == [
        f"wiped/{v}" for v in ("0.0", "0.1", "1.0", "1.1")
    ]
    assert len(set(feed.column("batches", "kafka_topic_id"))) == 2
    assert feed.column("dead_letters", "reason") == []


@pytest.mark.long
def test_an_older_copy_stops_who_was_further(installation: Settings, tmp_path: Path) -> None:
    """The topic ids are unchanged, but the topics end before the lake's and trainer's positions.

    Both stop with an explanation and delete nothing.
    """
    home = installation.data_dir
    a_life(installation, "one", ["0.0", "1.0"], 2)
    shutil.copytree(home / "broker", tmp_path / "older-broker")
    a_life(installation, "two", ["0.0", "1.0", "2.1"], 4)
    shutil.rmtree(home / "broker")
    (tmp_path / "older-broker").rename(home / "broker")
    with up(installation) as running:
        for name in ("lake", "trainer"):
            running.until_state(name, "source truncated")
            assert running.table[name]["exit_code"] == EXIT_SOURCE
            assert "source truncated: claw." in running.log(
                name
            ) and "run clawstream status --positions" in running.log(name)
        told = call("status", "--positions", *overrides_of(installation))
        assert told.returncode == 1, told.stderr
        beyond = {
            line.split()[0] for line in told.stdout.splitlines() if line.endswith("beyond the end")
        }
        assert beyond == {"lake", "trainer"}, told.stdout
        assert "restore its newer data" in told.stdout
        running.stop()
    assert (home / "checkpoints" / "wiped" / "2.1").is_dir(), (
        "what the copy knows nothing of is not thrown away"
    )
