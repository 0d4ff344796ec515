"""A second admission, trainer or lake writer beside `clawstream up`.

The newer process continues; the older process is fenced and stays stopped.
"""

from __future__ import annotations

import signal
from pathlib import Path
from uuid import uuid4

import pytest
from support.feed import POLICY, Feed
from support.up import up

from clawstream.runtime.exit_codes import EXIT_FENCED
from clawstream.schemas.settings import Settings

FENCED = ("admit", "trainer", "lake")


@pytest.fixture
def installation(kafka: str, tmp_path: Path, model_dir: Path) -> Settings:
    return Settings.model_validate(
        {
            "run_id": "fenced",
            "data_dir": tmp_path / "data",
            "kafka": {
                "bootstrap_servers": kafka,
                "topic_prefix": f"t{uuid4().hex[:10]}",
                "partitions": 2,
            },
            "admit": {"channels": ["train"], "policy": POLICY},
            "trainer": {"model_path": model_dir, "device": "cpu"},
            "lake": {"flush_interval_s": 0.2},
            "up": {"processes": ["assemble", *FENCED]},
        }
    )


def test_the_newer_takes_over_and_the_older_stays_down(installation: Settings) -> None:
    feed = Feed(installation)
    with up(installation) as running:
        feed.group("first")
        running.until(lambda: feed.ids() == ["0.0", "1.0"], "the loop works")
        running.until(lambda: feed.column("batches", "batch_seq") == [0], "the lake writes")

        newer = [
            running.alone(f"second-{words[0]}", *words)
            for words in (("admit",), ("train",), ("lake",))
        ]
        for name, begun in (
            ("admit", "admission_starts"),
            ("train", "resumed"),
            ("lake", "lake_follows"),
        ):
            running.until_says(f"second-{name}", begun)
        # An idle process notices the takeover at its next write. One group makes all three
        # processes write.
        feed.group("second")
        for name in FENCED:
            running.until_state(name, "fenced")
        running.until(lambda: feed.ids() == ["0.0", "1.0", "2.1"], "the second trainer works on")
        feed.group("third")
        running.until(lambda: feed.ids() == ["0.0", "1.0", "2.1", "3.1"], "the second ones work on")
        running.until(
            lambda: sorted(feed.column("batches", "batch_seq")) == [0, 1, 2],
            "the second lake works on",
        )
        running.until(
            lambda: set(feed.steps) <= set(feed.column("steps", "step_id")),
            "all steps are in the lake",
        )

        for name in FENCED:
            row = running.table[name]
            assert (row["state"], row["exit_code"], row["restarts"], row["pid"]) == (
                "fenced",
                EXIT_FENCED,
                0,
                None,
            )
            assert f'"exit_code": {EXIT_FENCED}' in running.log(name), "it says so"
        assert running.state("assemble") == "running"
        assert feed.groups() == ["first", "second", "third"]
        running.stop()
        for process in newer:
            process.send_signal(signal.SIGTERM)
            assert process.wait(180) == 0
    assert sorted(feed.column("steps", "step_id")) == sorted(feed.steps), (
        "each step once, whichever writer took it"
    )
    feed.close()
