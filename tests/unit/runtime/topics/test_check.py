"""Test the checks of existing topics: their retention covers what the jobs need."""

from __future__ import annotations

from typing import Any

import pytest

from clawstream.runtime.topics.check import find_mismatches
from clawstream.schemas.settings import Settings
from clawstream.schemas.topics import Topics, TopicSpec

WEEK, MONTH = str(7 * 86_400_000), str(30 * 86_400_000)
TOPICS = Topics()
CENTURIES = ["9223372036854775807", "7730941129200000"]
"""The largest value, and the value of a broker's `log.retention.hours=2147483647`."""


def found(changed: dict[str, dict[str, str]], **settings: Any) -> list[tuple[str, str, str, str]]:
    """Return the misfits of a new installation after changes to some topics' configuration."""
    chosen = Settings.model_validate(settings)
    kafka = chosen.kafka
    specs: list[TopicSpec] = [*TOPICS.specs(kafka.partitions, int(kafka.steps_retention_s * 1000))]
    specs.append(TOPICS.ready_batches_spec("r", "train"))
    # Topics as an earlier start created them.
    made = {s.name: dict(s.config) for s in Topics().specs(12, int(MONTH))}
    made[specs[-1].name] = dict(specs[-1].config)
    there = {s.name: s.partitions for s in specs}
    configs = {name: config | changed.get(name, {}) for name, config in made.items()}
    return [
        (m.topic, m.setting, m.found, m.wanted)
        for m in find_mismatches(chosen, specs, there, configs)
    ]


def test_what_we_make_fits_copies_too() -> None:
    assert found({}) == []
    for_ever = {"retention.ms": "-1", "message.timestamp.type": "CreateTime"}
    assert (
        found({TOPICS.steps: for_ever, TOPICS.rewards: for_ever}, jobs={"write_ticks": False}) == []
    )


@pytest.mark.parametrize(
    "topic",
    [
        TOPICS.rewards,
        TOPICS.candidates,
        TOPICS.assembly,
        TOPICS.weights,
        TOPICS.dead_letters,
        TOPICS.ready_batches("r", "train"),
    ],
)
@pytest.mark.parametrize("setting", ["retention.ms", "retention.bytes"])
def test_what_is_kept_for_ever_has_no_end(topic: str, setting: str) -> None:
    """A broker's default of seven days would silently delete a live run's decisions."""
    assert found({topic: {setting: WEEK}}) == [(topic, setting, WEEK, "-1")]


@pytest.mark.parametrize("setting", ["retention.ms", "retention.bytes"])
@pytest.mark.parametrize("endless", CENTURIES)
def test_what_nobody_outlives_is_for_ever(setting: str, endless: str) -> None:
    assert found({TOPICS.candidates: {setting: endless}}) == []
    assert found({TOPICS.candidates: {setting: str(99 * 365 * 86_400_000)}}) != []


def test_payload_is_kept_as_long_as_the_settings_say_or_longer() -> None:
    kept = (TOPICS.steps, TOPICS.trajectories, TOPICS.trained_tokens)
    assert found({t: {"retention.ms": WEEK} for t in kept}) == [
        (t, "retention.ms", WEEK, MONTH) for t in kept
    ]
    for longer in ("-1", str(2 * int(MONTH))):
        assert found({t: {"retention.ms": longer} for t in kept}) == []
    week = {"steps_retention_s": int(WEEK) / 1000}
    assert found({t: {"retention.ms": WEEK} for t in kept}, kafka=week) == []
    two_months = {"steps_retention_s": 2 * int(MONTH) / 1000}
    assert [m[0] for m in found({}, kafka=two_months)] == [*kept], (
        "settings that ask for more than the topics keep"
    )
    assert found({TOPICS.steps: {"retention.bytes": "1000000"}}) == [
        (TOPICS.steps, "retention.bytes", "1000000", "-1")
    ]
    assert found({TOPICS.workers: {"retention.ms": "1", "retention.bytes": "1"}}) == [], (
        "compacted: by key alone"
    )
