"""A trajectory of thousands of steps on a real Kafka.

It passes the real jobs and ends as the trainer's sequences.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.jobs import Eventually, Jobs, reward, running, session, step

from clawstream.runtime.kafka import Cluster
from clawstream.runtime.process.config import overrides_of
from clawstream.runtime.topics.records import Decoder
from clawstream.schemas.records import Candidate, ReadyBatch
from clawstream.schemas.settings import Settings
from clawstream.stream_jobs.admit.decisions.journal import decode_journal_record
from clawstream.trainer.data.sequences import sequences_of
from clawstream.trainer.data.trajectories import read_payload

ADMIT = (
    "import sys; from clawstream.runtime.process.config import load; "
    "from clawstream.stream_jobs.admit.main import main; "
    "main(load(overrides=sys.argv[1:]))"
)
KEY = "swe-" + "repository-issue." * 11
STEPS = 2100
REPLY = b'{"content":"' + b"x" * 2500 + b'"}'
"""With replies of this size the payload takes two records."""


@pytest.fixture
def jobs(settings: Settings, cluster: Cluster, tmp_path: Path) -> Iterator[Jobs]:
    """Run an installation with groups of two that wait for a reward."""
    policy = settings.admit.policy.model_copy(
        update={"group_size": 2, "batch_groups": 1, "required_rewards": ("env/score",)}
    )
    admit = settings.admit.model_copy(update={"channels": ("train",), "policy": policy})
    tuned = settings.model_copy(update={"run_id": "run", "admit": admit})
    with running(tuned, cluster, tmp_path) as made:
        yield made


def test_a_trajectory_of_thousands_of_steps_is_trained_with_all_of_them(
    jobs: Jobs, eventually: Eventually
) -> None:
    jobs.start()
    jobs.processes.start("admit", [sys.executable, "-c", ADMIT, *overrides_of(jobs.settings)])
    for key in (KEY, "short"):
        jobs.put(session(key, "opened", group_id="g", group_size=2))
    jobs.put(step("short", [1], [2]), session("short", "completed"), reward("short", 0.0))
    prompt, ids = [0], []
    for n in range(STEPS):
        made = replace(step(KEY, prompt, [n, n]), response_json=REPLY)
        jobs.put(made)
        ids.append(made.step_id)
        prompt = [*prompt, n, n, 1] if n % 100 < 99 else [0, n]
    jobs.put(session(KEY, "completed"), reward(KEY, 1.0))
    jobs.put(*(reward(KEY, 0.5, step_id=ids[n]) for n in range(0, STEPS, 3)))
    jobs.producer.flush()

    journal = jobs.topics.ready_batches("run", "train")
    decoder = Decoder(jobs.cluster, jobs.topics.schemas)

    def batches() -> list[ReadyBatch]:
        records = jobs.cluster.read_all(journal) if jobs.cluster.topics(journal) else ()
        return [
            d for r in records if isinstance(d := decode_journal_record(decoder, r), ReadyBatch)
        ]

    (batch,) = eventually(batches, 300)
    (member,) = (m for m in batch.groups[0].members if m.trajectory_id == KEY)
    assert (member.untrainable_steps, member.trainable_tokens) == ((), 2 * STEPS)
    assert member.place.last_offset > member.place.first_offset
    sizes = [
        len(r.value or b"")
        for r, c in jobs.records(jobs.topics.candidates, Candidate)
        if c.trajectory_id == KEY
    ]
    assert min(sizes) > 200 * STEPS

    trajectory = read_payload(jobs.cluster, decoder, jobs.topics.trajectories, "test", batch)[KEY]
    assert [s.step_id for s in trajectory.steps] == ids
    rows = sequences_of(trajectory, member.untrainable_steps)
    trained = [t for row in rows for t in row.tokens.trained().ids.tolist()]
    assert sorted(trained) == sorted(n for n in range(STEPS) for _ in range(2))
