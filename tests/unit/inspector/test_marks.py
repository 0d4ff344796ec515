"""Marks in the pages: the events that forms write, what shows at once, and how it is taken back."""

from __future__ import annotations

import re
from typing import Any

import pytest
from support.inspector import CURATOR_KEY, HOSTILE, Inspected, inspected

from clawstream.schemas.records import Curation, Reward
from clawstream.schemas.settings import Settings

pytestmark = pytest.mark.slow
G0 = {"of": "trajectory", "run": "run", "trajectory": "g-0", "next": "/t/run/g-0"}


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Inspected:
    return inspected(Settings(data_dir=tmp_path_factory.mktemp("marks")))


@pytest.fixture
def shown(lake: Inspected) -> Inspected:
    """A process that has written nothing yet."""
    return lake.restarted()


def mark(shown: Inspected, target: dict[str, str], **values: str) -> None:
    reply = shown.client.post("/marks", data=target | values)
    assert (reply.status_code, reply.headers["location"]) == (303, target.get("next", "/"))


def undo(shown: Inspected, **which: str) -> None:
    assert shown.client.post("/marks/undo", data=which).status_code == 303


def events(shown: Inspected) -> list[Any]:
    return [event for _, _, event in shown.log.events]


def chips(text: str) -> list[str]:
    text = re.sub(r"<bdi>([^<]*)</bdi>", r"\1", text)
    return re.findall(r'class="chip">([^<]*)</', text)


def test_a_mark_is_an_event_with_who_and_when_and_shows_at_once(shown: Inspected) -> None:
    mark(shown, G0, trainable="no", quality="0.25", tags="loop, odd", note="see step 1")
    ((topic, key, event),) = shown.log.events
    assert (topic, key) == (shown.settings.kafka.topics.rewards, b"g-0")
    assert isinstance(event, Curation) and event.by == "ann" and event.created_at > 0
    assert (event.trainable, event.quality, event.tags) == (False, 0.25, ("loop", "odd"))
    for path in ("/t/run/g-0", "/trajectories", "/group?run=run&id=g", "/marks"):
        said = chips(shown.client.get(path).text)
        assert {"not trainable", "quality 0.25", "loop", "odd"} <= set(said), path
    assert "see step 1" in shown.client.get("/marks").text


@pytest.mark.parametrize(
    ("path", "changes"),
    [
        ("/marks", {"quality": "nan"}),
        ("/marks", {"quality": "0.5", "trajectory": "../g-0"}),
        ("/marks", {"quality": "0.5", "run": ""}),
        ("/marks/undo", {"by": "ann", "made_at": "1e999"}),
        ("/marks/undo", {"by": "ann", "made_at": "nan"}),
        ("/marks/undo", {"event_id": "none"}),
    ],
)
def test_an_invalid_form_is_refused(shown: Inspected, path: str, changes: dict[str, str]) -> None:
    reply = shown.client.post(path, data=G0 | changes)
    assert reply.status_code == 422 and "Not possible" in reply.text and not shown.log.events


def test_a_step_is_marked_apart_from_its_trajectory(shown: Inspected) -> None:
    mark(shown, G0 | {"step": "g-0~1.0", "next": "/t/run/g-0#step-1"}, trainable="no")
    (event,) = events(shown)
    assert event.step_id == "g-0~1.0"
    text = shown.client.get("/t/run/g-0").text
    head, step = text.split('id="step-1"')
    assert "not trainable" not in chips(head) and "not trainable" in chips(step)
    assert chips(shown.client.get("/trajectories").text) == []


def test_of_each_field_the_last_mark_holds_until_it_is_taken_back(shown: Inspected) -> None:
    mark(shown, G0, quality="0.25", tags="loop")
    mark(shown, G0, quality="0.75")
    first, second = events(shown)
    text = shown.client.get("/t/run/g-0").text
    assert chips(text)[:2] == ["quality 0.75", "loop"]
    undo(shown, event_id=second.event_id, next="/t/run/g-0")
    back = events(shown)[-1]
    assert (back.takes_back, back.by, back.trajectory_key) == (second.event_id, "ann", "g-0")
    assert (back.quality, back.trainable, back.tags) == (None, None, None)
    text = shown.client.get("/t/run/g-0").text
    assert chips(text)[:2] == ["quality 0.25", "loop"] and "taken back by ann" in text
    undo(shown, event_id=first.event_id)
    assert chips(shown.client.get("/trajectories").text) == []
    again = shown.client.post("/marks/undo", data={"event_id": first.event_id})
    assert again.status_code == 422 and len(events(shown)) == 4


def test_a_reward_that_is_taken_back_gives_way_to_the_one_before(shown: Inspected) -> None:
    mark(shown, G0, reward="1", reward_name="taste")
    mark(shown, G0, reward="0.5", reward_name="taste")
    one, half = events(shown)
    assert isinstance(half, Reward) and (half.source, half.value) == ("human", 0.5)
    assert half.reward_revision > one.reward_revision
    undo(shown, event_id=half.event_id)
    undo(shown, event_id=one.event_id)
    back, gone = events(shown)[2:]
    assert (back.value, back.name, back.reason) == (1.0, "taste", None)
    assert (gone.value, gone.reason) == (None, "taken back by ann")
    assert gone.reward_revision > back.reward_revision > half.reward_revision
    assert chips(shown.client.get("/trajectories").text) == []


def test_a_group_is_marked_and_taken_back_as_one_action(shown: Inspected) -> None:
    mark(shown, {"of": "group", "run": "run", "group": "g"}, reward="2", quality="1")
    marked = events(shown)
    assert sorted((e.trajectory_key, type(e).__name__) for e in marked) == [
        ("g-0", "Curation"), ("g-0", "Reward"), ("g-1", "Curation"), ("g-1", "Reward"),
    ]  # fmt: skip
    assert len({e.created_at for e in marked}) == 1
    text = shown.client.get("/marks").text
    assert "and 1 more" in text and chips(text) == ["quality 1", "rating 2"]
    undo(shown, by="ann", made_at=str(marked[0].created_at))
    backs = events(shown)[4:]
    assert {e.takes_back for e in backs if isinstance(e, Curation)} == {
        e.event_id for e in marked if isinstance(e, Curation)
    }
    assert [e.value for e in backs if isinstance(e, Reward)] == [None, None]
    assert "taken back by ann" in shown.client.get("/marks").text


def all_of(shown: Inspected, query: str) -> dict[str, str]:
    """Return the hidden fields of the form that marks a list."""
    text = shown.client.get(f"/trajectories?{query}").text
    form = text[text.index("<summary", text.index('class="mark"')) :].partition("</form>")[0]
    found = dict(re.findall(r'type="hidden" name="(\w+)" value="([^"]*)"', form))
    return {name: value.replace("&amp;", "&") for name, value in found.items()}


def test_a_mark_of_a_query_has_the_targets_of_the_list(shown: Inspected) -> None:
    form = all_of(shown, "reward_min=0.5&channel=train&sort=-reward")
    mark(shown, form, trainable="no", count="2")
    assert sorted(e.trajectory_key for e in events(shown)) == ["evil", "g-0"]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, "type 2"), ({"count": "3"}, "type 2"), ({"count": "3", "total": "3"}, "load the list"),
        ({"count": "2", "newest": "1970-01-01T00:00:01"}, "load the list"),
        ({"count": "2", "query": "reward_mim=0.5"}, "reward_mim"),
    ],
)  # fmt: skip
def test_a_list_that_has_changed_or_is_not_confirmed_is_not_marked(
    shown: Inspected, changes: dict[str, str], why: str
) -> None:
    form = all_of(shown, "reward_min=0.5&channel=train") | {"trainable": "no"} | changes
    reply = shown.client.post("/marks", data=form)
    assert reply.status_code == 422 and why in reply.text
    assert events(shown) == []


@pytest.mark.parametrize(
    "target", [{"trajectory": "none"}, {"run": "none"}, {"step": "evil"}, {"step": "g-1~0.0"}]
)
def test_what_the_lake_does_not_have_is_not_marked(
    shown: Inspected, target: dict[str, str]
) -> None:
    reply = shown.client.post("/marks", data=G0 | {"quality": "1"} | target)
    assert reply.status_code == 422 and "(yet)" in reply.text
    assert events(shown) == []


def test_the_lake_tells_what_others_and_former_processes_marked(shown: Inspected) -> None:
    by_rule = Curation(
        event_id="other", run_id="run", trajectory_key="h-1", by="rule", quality=0.25, created_at=9
    )
    given = Reward(
        event_id="given", run_id="run", trajectory_key="h-1", by="eve", source="human", name="n",
        function_version="1", value=3.0, reward_revision=0, created_at=10,
    )  # fmt: skip
    shown.written.lake.put("curation", "UU", by_rule)
    shown.written.lake.put("rewards", "RR", given)
    assert shown.lake.refresh()
    text = shown.client.get("/t/run/h-1").text
    assert chips(text)[:2] == ["quality 0.25", "n 3"] and "<b>rule</b>" in text
    undo(shown, event_id="other")
    assert chips(shown.client.get("/t/run/h-1").text)[0] == "n 3"
    mark(shown, G0 | {"trajectory": "h-1"}, quality="0.5")
    (_, mine) = events(shown)
    shown.written.lake.put("curation", "UU", *events(shown))
    assert shown.lake.refresh()
    text = shown.client.get("/t/run/h-1").text
    assert text.count(mine.event_id) == 1, "the lake and the memory have the same mark"
    assert not shown.parts.marks.written("run", ["h-1"]), "an erasure would not reach the memory"
    assert "quality 0.5" in chips(shown.restarted().client.get("/t/run/h-1").text)


def test_text_of_marks_is_escaped(shown: Inspected) -> None:
    mark(shown, G0, note=HOSTILE, tags=HOSTILE, reward="1", reward_name=HOSTILE)
    for path in ("/t/run/g-0", "/trajectories", "/group?run=run&id=g", "/marks"):
        text = shown.client.get(path).text
        assert "<img" not in text and "<script>" not in text and "onerror" in text, path


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({}, "the mark is empty"), ({"quality": "2"}, "quality"), ({"quality": "much"}, "quality"),
        ({"reward": "11"}, "reward"), ({"tags": "x" * 201}, "tags"),
        ({"of": "group", "group": "none", "quality": "1"}, "no such trajectory"),
        ({"of": "all", "quality": "1"}, "of:"), ({"run": "Not A Run", "quality": "1"}, "Not A Run"),
    ],
)  # fmt: skip
def test_a_mark_that_would_not_count_is_refused(
    shown: Inspected, values: dict[str, str], why: str
) -> None:
    reply = shown.client.post("/marks", data=G0 | values)
    assert reply.status_code in (422, 503) and why in reply.text
    assert events(shown) == []


def test_only_a_key_with_the_scope_gives_rewards(shown: Inspected) -> None:
    curator = {"authorization": f"Bearer {CURATOR_KEY}"}
    assert 'name="reward"' not in shown.client.get("/t/run/g-0", headers=curator).text
    reply = shown.client.post("/marks", data=G0 | {"reward": "1"}, headers=curator)
    assert reply.status_code == 403 and "scope reward" in reply.text
    mark(shown, G0, reward="1")
    (given,) = events(shown)
    reply = shown.client.post("/marks/undo", data={"event_id": given.event_id}, headers=curator)
    assert reply.status_code == 403
    assert shown.client.post("/marks", data=G0 | {"quality": "1"}, headers=curator).is_redirect
    assert [e.by for e in events(shown)] == ["ann", "bob"]


def test_marks_are_off_without_a_broker_and_the_pages_say_so(shown: Inspected) -> None:
    shown.log.connected = False
    for path in ("/t/run/g-0", "/trajectories", "/group?run=run&id=g", "/marks"):
        text = shown.client.get(path).text
        assert "Marks are off" in text and 'action="/marks"' not in text
    reply = shown.client.post("/marks", data=G0 | {"quality": "1"})
    assert reply.status_code == 503 and "only reads" in reply.text and events(shown) == []


@pytest.mark.parametrize("path", ["/marks", "/marks/undo", "/sql", "/runs/run/policy"])
@pytest.mark.parametrize(
    "header",
    [{"origin": "https://evil.example"}, {"origin": "null"}, {"sec-fetch-site": "same-site"}],
)
def test_a_form_of_another_site_changes_nothing(
    shown: Inspected, path: str, header: dict[str, str]
) -> None:
    reply = shown.client.post(path, data=G0 | {"quality": "1", "q": "SELECT 1"}, headers=header)
    assert reply.status_code == 403 and events(shown) == []


def test_a_form_has_a_longest_size(shown: Inspected) -> None:
    reply = shown.client.post("/marks", data=G0 | {"note": "x" * 70_000})
    assert reply.status_code == 413 and events(shown) == []
