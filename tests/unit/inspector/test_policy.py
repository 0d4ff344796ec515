"""The page of the admission policy over a lake: its preview, its history, and who may change it."""

from __future__ import annotations

import re

import pytest
from support.admit import cand, policy
from support.inspector import CURATOR_KEY, Inspected, inspected

from clawstream.inspector.queries.policy import preview
from clawstream.schemas.records import (
    BatchGroup,
    BatchMember,
    Place,
    PolicyApplied,
    ReadyBatch,
    WeightVersion,
)
from clawstream.schemas.settings import Settings

pytestmark = pytest.mark.slow
RUN = "/runs/r/policy"
AT = Place(topic_id="T", partition=0, first_offset=0, last_offset=0)


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Inspected:
    """Return run r: two policies, a good group, one of equal rewards and one of one member."""
    made = inspected(Settings(data_dir=tmp_path_factory.mktemp("policy")))
    first = policy(created_at=1)
    second = policy(policy_version=2, batch_groups=4, published_by="eve@host", created_at=2)
    applied = PolicyApplied(
        run_id="r", channel="train", policy=second, input_topic_id="C", from_offset=0
    )
    lake = made.written.lake
    lake.put("run_events", "PP", first, second)
    lake.put("run_events", "BB", applied)
    lake.put(
        "candidates", "DD",
        cand("a", "g", 1.0, group_size=3, quality=0.9),
        cand("b", "g", 0.0, group_size=3, quality=0.8),
        cand("c", "g", 0.5, group_size=3, quality=0.2),
        cand("d", "same", 1.0), cand("e", "same", 1.0), cand("f", "alone", 1.0),
    )  # fmt: skip
    assert made.lake.refresh()
    return made


def verdicts(shown: Inspected, **changes: str) -> dict[tuple[str | None, str | None], set[str]]:
    """Return (verdict now, verdict with the changes) to the trajectories."""
    log = shown.parts.policies.of("r")
    assert log is not None
    after = shown.parts.policies.changed("r", changes)
    found = preview(shown.lake, "r", log.newest, after)
    assert [len(change.examples) for change in found] == [change.trajectories for change in found]
    return {(change.before, change.after): set(change.examples) for change in found}


def test_the_page_shows_the_policy_of_the_lake_and_its_history(shown: Inspected) -> None:
    shown.log.connected = False
    text = shown.client.get(RUN).text
    shown.log.connected = True
    assert "Admission policy 2" in text and "eve@host" in text and "Saving is off" in text
    assert 'name="batch_groups" value="4"' in text
    assert 'name="sync_every"' not in text, "it is fixed for a run"
    assert re.search(r"<code>batch_groups</code> 1 → 4", text)
    assert shown.client.get("/runs/none/policy").status_code == 404
    assert shown.client.get("/runs/Not%20A%20Run/policy").status_code == 404


def test_a_preview_decides_groups_as_admission_does(shown: Inspected) -> None:
    same = verdicts(shown)
    assert same == {
        (None, None): {"a", "b", "c"}, ("zero_variance", "zero_variance"): {"d", "e"},
        ("incomplete", "incomplete"): {"f"},
    }  # fmt: skip
    assert verdicts(shown, min_quality="0.5")[None, "quality"] == {"c"}
    assert verdicts(shown, min_quality="0.5")[None, None] == {"a", "b"}
    strict = verdicts(shown, min_quality="0.85")
    assert strict[None, "quality"] == {"a", "b", "c"}, "as a whole group"
    assert verdicts(shown, drop_zero_variance="false")["zero_variance", None] == {"d", "e"}
    assert verdicts(shown, required_rewards="[human/taste]")[None, "reward_missing"] == {
        "a", "b", "c",
    }  # fmt: skip


def test_the_page_compares_the_fields_of_its_address(shown: Inspected) -> None:
    text = shown.client.get(RUN, params={"min_quality": "0.5", "batch_groups": "4"}).text
    assert re.search(r"<code>min_quality</code> null → 0.5", text)
    assert 'id="now">3<' in text and 'id="then">2<' in text
    assert '/t/r/c">c</a>' in text


@pytest.mark.parametrize(
    ("field", "text"),
    [("min_quality", "7"), ("group_size", ""), ("algorithm", "none"), ("reward_weights", "{")],
)
def test_a_wrong_field_is_named(shown: Inspected, field: str, text: str) -> None:
    reply = shown.client.get(RUN, params={field: text})
    (said,) = re.findall(r'role="alert">([^<]*)<', reply.text)
    assert reply.status_code == 422 and field in said and 'id="preview"' not in reply.text


def test_saving_needs_a_broker_and_the_scope_admin(shown: Inspected) -> None:
    curator = {"authorization": f"Bearer {CURATOR_KEY}"}
    form = {"version": "2", "batch_groups": "8"}
    assert shown.client.post(RUN, data=form, headers=curator).status_code == 403
    shown.log.connected = False
    assert shown.client.post(RUN, data=form).status_code == 503
    shown.log.connected = True
    assert 'id="save"' in shown.client.get(RUN).text
    assert 'id="save"' not in shown.client.get(RUN, headers=curator).text


def test_a_decided_trajectory_keeps_its_staleness(shown: Inspected) -> None:
    """Weights that were published after the decision do not make it stale."""
    members = tuple(
        BatchMember(
            trajectory_id=name, trajectory_key=name, revision=0, place=AT, rewards=(),
            untrainable_steps=(), trainable_tokens=5, oldest_sync_index=0,
        )
        for name in "abc"
    )  # fmt: skip
    batch = ReadyBatch(
        run_id="r", channel="train", batch_seq=1,
        groups=(BatchGroup(group_id="g", round=0, n=3, members=members),), policy_version=1,
        sync_every=1, algorithm="grpo", reward_weights={}, input_topic_id="C", input_partition=0,
        input_from=0, input_to=1, content_hash="", trainable_tokens=15, created_at_event_time=0,
    )  # fmt: skip
    newest = WeightVersion(
        version_id="r/9.0", run_id="r", sync_index=9, attempt=0, format="full", files=(),
        channel="train", metrics={}, created_at=0,
    )  # fmt: skip
    shown.written.lake.put("groups", "BB", batch)
    shown.written.lake.put("weights", "WW", newest)
    assert shown.lake.refresh()
    assert verdicts(shown, max_staleness="1")[None, None] == {"a", "b", "c"}
    assert verdicts(shown, max_staleness="0")[None, "stale"] == {"a", "b", "c"}
    assert verdicts(shown, max_staleness="8", drop_zero_variance="false")[
        "zero_variance", "stale"
    ] == {"d", "e"}
