"""Text of any record is text on every page, never markup."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import pytest
from support.admit import policy
from support.export_lake import trajectory, turn
from support.inspector import HOSTILE, inspected
from support.markup import unsafe

from clawstream.inspector.queries.listing import open_rows
from clawstream.inspector.web.rendering import text_of
from clawstream.schemas import records
from clawstream.schemas.settings import Settings

pytestmark = pytest.mark.slow


def test_no_text_of_any_record_is_markup(tmp_path: Path) -> None:
    """As another producer may write them: the gateway itself checks ids."""
    made = inspected(Settings(data_dir=tmp_path))
    lake, key = made.written.lake, "all"
    step = replace(
        turn(key, 0, [1], [2, 3]), model=HOSTILE, user_agent=HOSTILE, group_id=HOSTILE,
        step_id=HOSTILE, call_id=HOSTILE, gateway_id=HOSTILE, version_first=HOSTILE,
        version_last=HOSTILE, tokens_absent_reason=HOSTILE, finish_reason=HOSTILE,
        tags=(records.Tag(name=HOSTILE, evidence=HOSTILE),), traceparent=HOSTILE,
    )  # fmt: skip
    payload = replace(
        trajectory(key, [step], 0, HOSTILE), metadata_json=HOSTILE.encode(), reason=HOSTILE
    )
    value = records.RewardValue(source="judge", name=HOSTILE, function_version=HOSTILE,
                                reason=HOSTILE, step_id=HOSTILE, reward_revision=0)  # fmt: skip
    candidate = records.Candidate(
        run_id="run", channel="train", trajectory_key=key, trajectory_id=key, group_id=HOSTILE,
        revision=0, outcome="failed", opened_at=1, closed_at=2, rewards=(value,), prompt_tokens=1,
        trainable_tokens=2, trainable=False, reason=HOSTILE, tags=(HOSTILE,),
        steps=(records.CandidateStep(step_id=HOSTILE, index=0, response_tokens=2,
                                     trainable=False, reason=HOSTILE),),
    )  # fmt: skip
    refused = records.Refused(
        run_id="run", channel="train", group_id=HOSTILE, trajectory_ids=(key,), revisions=(0,),
        whole_group=True, reason=HOSTILE, detail=HOSTILE, n=1, input_topic_id="C", input_from=0,
        input_to=1,
    )  # fmt: skip
    finding = records.Finding(rule=HOSTILE, step_id=HOSTILE, score=0.5, evidence=HOSTILE)
    assessment = records.Assessment(
        event_id="a", run_id="run", trajectory_key=key, trajectory_id=key, rules=(HOSTILE,),
        step_quality=(0.5,), findings=(finding,), assessment_revision=0, by=HOSTILE, created_at=1,
    )  # fmt: skip
    mark = records.Curation(
        event_id=HOSTILE, run_id="run", trajectory_key=key, tags=(HOSTILE,), note=HOSTILE,
        by=HOSTILE, created_at=1,
    )  # fmt: skip
    failed = records.FailedCall(
        event_id="f", run_id="run", trajectory_key=key, protocol=HOSTILE, streamed=False,
        source="engine", status=500, error_type=HOSTILE, message=HOSTILE, user_agent=HOSTILE,
        gateway_id="g", received_at=1, duration_ms=1.0,
    )  # fmt: skip
    tables = {"steps": step, "trajectories": payload, "candidates": candidate, "groups": refused,
              "assessments": assessment, "curation": mark, "failed_calls": failed,
              "run_events": replace(policy(), run_id="run", published_by=HOSTILE,
                                    untrained_tags=(HOSTILE,))}  # fmt: skip
    for name, record in tables.items():
        lake.put(name, f"topic-{name}", record)
    assert made.lake.refresh()
    group = f"/group?run=run&id={quote(HOSTILE)}"
    at = "/t/run/all"
    for path in ("/", "/runs/run", "/runs/run/policy", "/trajectories", group, "/marks", at,
                 f"{at}/step/0", f"{at}/tokens", "/operations"):  # fmt: skip
        reply = made.client.get(path)
        assert reply.status_code == 200 and unsafe(reply.text) == [], path
        assert path in ("/", "/operations") or "&lt;script&gt;" in reply.text, path
    query = "SELECT '<img src=x onerror=alert(1)>' AS \"<script>alert(1)</script>\""
    found = made.client.post("/sql", data={"q": query})
    assert unsafe(found.text) == [] and "<th>&lt;script&gt;" in found.text
    live = text_of("live.html", rows=open_rows(made.lake, 9), source="lake")
    assert unsafe(live) == []
