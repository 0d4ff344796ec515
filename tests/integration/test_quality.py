"""Quality from end to end: rules in the reward job, candidates, the lake, and marks by query."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from support.jobs import ROOT, Jobs, running, session, step
from typer.testing import CliRunner

from clawstream.cli.main import app
from clawstream.runtime.kafka import Cluster
from clawstream.runtime.process.child import die_with_parent
from clawstream.runtime.process.config import overrides_of
from clawstream.schemas.records import Assessment, Candidate, Reward
from clawstream.schemas.settings import Settings


def test_quality_from_rules_to_marks(
    settings: Settings, cluster: Cluster, tmp_path: Path, eventually: Any
) -> None:
    with running(settings, cluster, tmp_path) as jobs:
        jobs.start()
        reward = jobs.start(
            "0",
            "reward",
            quality_functions={"run": ("built_in",)},
            reward_functions={"*": ("clawstream.schemas.tokens:count@1",)},
        )
        cut = step("cut", [1, 2], list(range(30)), finish_reason="length")
        jobs.put(*jobs.conversation("good"), cut, session("cut", "completed"))
        jobs.producer.flush()

        def assessed() -> dict[str, Candidate]:
            """Return the candidates when they have their rewards too: no revision follows."""
            found = jobs.candidates()
            done = len(found) == 2 and all(
                c.assessment_revision == 7 and c.rewards for c in found.values()
            )
            return found if done else {}

        candidates = eventually(assessed)
        assert (
            candidates["good"].quality == 1.0
            and [s.quality for s in candidates["good"].steps] == [1.0] * 3
        )
        assert candidates["cut"].quality == 0.0 and [
            s.assessed_quality for s in candidates["cut"].steps
        ] == [0.0]
        records = jobs.records(jobs.topics.rewards, Assessment, Reward)
        for key in ("good", "cut"):
            mine = [e for _, e in records if e.trajectory_key == key]
            assert [type(e) for e in mine[:2]] == [Assessment, Reward], (
                "its quality is there with its first reward"
            )
        (said,) = {
            e.trajectory_key: e
            for _, e in records
            if isinstance(e, Assessment) and e.trajectory_key == "cut"
        }.values()
        assert [(f.rule, f.step_id, f.score, f.evidence) for f in said.findings] == [
            ("truncation@1", cut.step_id, 0.0, "finish reason length")
        ]

        reward.kill()  # it repeats the same rewards, so nothing is revised
        reward.wait()
        revisions = {k: c.revision for k, c in jobs.candidates().items()}
        jobs.put(replace(said, created_at=9), said)
        jobs.put(*jobs.conversation("after"))
        jobs.producer.flush()
        eventually(lambda: "after" in jobs.candidates())
        assert {k: jobs.candidates()[k].revision for k in revisions} == revisions
        curate_by_query(jobs, tmp_path, eventually)


def curate_by_query(jobs: Jobs, tmp_path: Path, eventually: Any) -> None:
    """Find the bad trajectory in the lake and mark its step."""
    with (tmp_path / "lake.log").open("wb") as log:
        command = [
            sys.executable,
            "-m",
            "clawstream",
            "lake",
            *overrides_of(jobs.settings),
            "lake.flush_interval_s=0.2",
        ]
        lake = subprocess.Popen(die_with_parent(command), cwd=ROOT, stdout=log, stderr=log)

    def curate(*words: str) -> dict[str, Any]:
        done = CliRunner().invoke(
            app, ["curate", *words, "--format", "json", *overrides_of(jobs.settings)]
        )
        return dict(json.loads(done.stdout)) if done.exit_code == 0 else {}

    try:
        query = ("--of", "steps", "--where", "quality < 0.5", "--quality", "0.75", "--by", "ann")
        found = eventually(lambda: (c := curate(*query)).get("found") and c)
        assert (found["found"], found["sent"], found["targets"][0]["trajectory_id"]) == (
            1,
            0,
            "cut",
        )
        assert jobs.candidates()["cut"].steps[0].quality == 0.0, "only counted"
        assert curate(*query, "--send")["sent"] == 1
        marked = eventually(lambda: (c := jobs.candidates()["cut"]).steps[0].quality == 0.75 and c)
        assert (marked.steps[0].assessed_quality, marked.quality) == (0.0, 0.0)
    finally:
        lake.terminate()
        assert lake.wait(180) == 0
