"""The page of a trajectory: its parts, failed and late calls, and the list of such calls."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from support.export_lake import ExportLake, turn
from support.inspector import Inspected, application, inspected
from support.run_lake import run_lake
from support.small_lake import SmallLake

from clawstream.inspector.queries.calls import PAGE as CALLS
from clawstream.inspector.queries.lake import COPIES
from clawstream.inspector.queries.trajectory import PAGE, placed
from clawstream.inspector.web.pages import PAGE_CHARACTERS
from clawstream.query.live_lake import LiveLake
from clawstream.schemas.records import FailedCall
from clawstream.schemas.settings import Settings

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Inspected:
    """Return the pages of a run with a failed call of `add-2-0` and a late one of `add-0-0`."""
    run_lake(settings := Settings(data_dir=tmp_path_factory.mktemp("run")))
    lake = LiveLake(settings, COPIES)
    return application(settings, ExportLake(SmallLake(settings), {}), lake)


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Inspected:
    return inspected(Settings(data_dir=tmp_path_factory.mktemp("pages")))


def conversation(key: str, turns: int, characters: int) -> list[Any]:
    """Return steps without tokens, so that none has a parent."""
    absent: dict[str, Any] = dict.fromkeys(
        ("prompt_token_ids", "response_token_ids", "response_logprobs")
    )
    messages: list[dict[str, str]] = [{"role": "system", "content": "be brief"}]
    steps = []
    for number in range(turns):
        messages.append({"role": "user", "content": f"q{number} " + "x" * characters})
        reply = {"role": "assistant", "content": f"r{number}."}
        steps.append(
            replace(
                turn(key, number, [1], [2]), tokens_absent_reason="text", **absent,
                request_json=json.dumps({"messages": messages}).encode(),
                response_json=json.dumps(reply).encode(),
            )
        )  # fmt: skip
        messages.append(reply)
    return steps


def steps_on(text: str) -> list[int]:
    return [int(index) for index in re.findall(r'class="step" id="step-(\d+)"', text)]


def test_a_long_trajectory_has_pages_that_follow_each_other(shown: Inspected) -> None:
    shown.written.put("long", conversation("long", PAGE + 3, 10), 1.0, "l")
    assert shown.lake.refresh()
    text = shown.client.get("/t/run/long").text
    assert steps_on(text) == list(range(PAGE)) and text.count("be brief") == 1
    (more,) = re.findall(r'id="more-steps" href="([^"]+)"', text)
    rest = shown.client.get(more).text
    assert steps_on(rest) == [PAGE, PAGE + 1, PAGE + 2] and "be brief" not in rest
    assert f'continues <a href="#step-{PAGE - 1}">' in rest and "more-steps" not in rest
    assert f'href="{more.partition("?")[0]}?first=0">Steps before {PAGE}' in rest


def test_a_page_ends_when_its_texts_are_too_many(shown: Inspected) -> None:
    shown.written.put("wide", conversation("wide", 45, 90_000), 1.0, "w")
    assert shown.lake.refresh()
    text = shown.client.get("/t/run/wide").text
    assert len(text) < PAGE_CHARACTERS + 400_000
    seen = steps_on(text)
    assert 10 < len(seen) < 45
    assert f"first={len(seen)}" in text


def test_a_text_of_five_megabytes_has_a_page_of_its_own(shown: Inspected) -> None:
    shown.written.put("huge", conversation("huge", 2, 2_500_000), 1.0, "h2")
    assert shown.lake.refresh()
    text = shown.client.get("/t/run/huge").text
    assert len(text) < 500_000
    found = re.findall(r'href="([^"]+/message/\d+)"', text)
    assert found == ["/t/run/huge/step/0/message/1", "/t/run/huge/step/1/message/3"]
    whole = shown.client.get(found[1])
    assert whole.headers["content-type"].startswith("text/plain")
    assert whole.text.count("x") >= 2_500_000
    assert shown.client.get("/t/run/huge/step/1/message/9").status_code == 404


def test_a_failed_call_is_in_the_trajectory_in_its_time_line_and_in_the_list(
    run: Inspected,
) -> None:
    text = run.client.get("/t/run/add-2-0").text
    assert text.count("engine: overloaded") == 3, "conversation, steps, timeline"
    overview = run.client.get("/runs/run").text
    (address,) = re.findall(r'href="(/calls[^"]*reason=[^"]*)">engine: overloaded', overview)
    listed = run.client.get(address.replace("&amp;", "&")).text
    assert (
        '/t/run/add-2-0"' in listed
        and ">full<" in listed
        and "late" not in listed.partition("<tbody>")[2]
    )


def test_a_late_call_is_in_the_trajectory_and_in_the_list(run: Inspected) -> None:
    text = run.client.get("/t/run/add-0-0").text
    assert steps_on(text) == [0, 1, 2] and "and 1 too late" in text
    assert "not in the trajectory: late" in text
    assert run.client.get("/t/run/add-0-0/step/2").status_code == 200
    listed = run.client.get("/calls?reason=late").text.partition("<tbody>")[2]
    assert '/t/run/add-0-0"' in listed and "overloaded" not in listed
    assert run.client.get("/calls?raeson=late").status_code == 422


def test_the_pages_of_the_list_have_each_call_once_also_those_of_one_moment(tmp_path: Path) -> None:
    made = inspected(Settings(data_dir=tmp_path))
    failed = FailedCall(
        event_id="", run_id="run", protocol="openai-chat", streamed=False, source="engine",
        status=503, message="", gateway_id="g", received_at=1_000_000, duration_ms=1.0,
    )  # fmt: skip
    calls = [replace(failed, event_id=f"e{n}", message=f"m{n}.") for n in range(CALLS + 2)]
    made.written.lake.put("failed_calls", "SS", *calls)
    assert made.lake.refresh()
    first = made.client.get("/calls").text
    (older,) = re.findall(r'href="(/calls[^"]*)">Older', first)
    rest = made.client.get(older.replace("&amp;", "&")).text
    seen = re.findall(r"<bdi>m(\d+)\.</bdi>", first + rest)
    assert sorted(map(int, seen)) == list(range(CALLS + 2)) and "Older" not in rest
    assert made.client.get("/calls?before_at=soon").status_code == 422


def test_failed_calls_stand_between_the_steps_of_their_page() -> None:
    began = datetime(2026, 1, 2)
    steps = [{"index": i, "received_at": began + timedelta(seconds=10 * i)} for i in range(6)]
    failures = [{"received_at": began + timedelta(seconds=s)} for s in (-1, 5, 25, 55)]

    def places(first: int, last: int) -> list[tuple[int | None, int]]:
        found = placed(failures, steps[first:last], steps)
        return [(before, len(failed)) for before, failed in found.items()]

    assert places(0, 6) == [(0, 1), (1, 1), (3, 1), (None, 1)]
    assert places(0, 2) == [(0, 1), (1, 1)]
    assert places(2, 4) == [(3, 1)]
    assert places(4, 6) == [(None, 1)]
    assert [before for before, _ in placed(failures, [], []).items()] == [None]


def test_a_row_of_a_list_leads_back_to_its_filters(shown: Inspected) -> None:
    listed = shown.client.get("/trajectories?group_id=g&sort=-reward").text
    address = re.findall(r'class="row id" [^>]* href="([^"]+)"', listed)[0]
    page = shown.client.get(address).text
    assert 'data-up href="/trajectories?group_id=g&amp;sort=-reward"' in page


def test_a_list_that_was_continued_has_an_address(
    shown: Inspected, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clawstream.inspector.queries.listing.PAGE", 2)
    text = shown.client.get("/trajectories?channel=train&rows=2").text
    (more,) = re.findall(r'hx-get="([^"]+)"', text)
    (address,) = re.findall(r'hx-replace-url="([^"]+)"', text)
    rows = shown.client.get(more.replace("&amp;", "&"), headers={"hx-request": "true"}).text
    both = text.count("<tr><td><span") + rows.count("<tr><td><span")
    again = shown.client.get(address.replace("&amp;", "&")).text
    assert again.count("<tr><td><span") == both == 4
    assert re.findall(r'hx-get="([^"]+)"', again) == re.findall(r'hx-get="([^"]+)"', rows)


def test_a_table_that_cannot_be_read_is_named_on_every_page(tmp_path: Path) -> None:
    made = inspected(Settings(data_dir=tmp_path))
    made.client.get("/")
    assert "Not up to date" not in made.client.get("/trajectories").text
    known = set(Path(made.settings.lake_uri, "candidates").rglob("*.parquet"))
    made.written.put("new", [turn("new", 0, [1], [2])], 1.0, "n")
    (new,) = set(Path(made.settings.lake_uri, "candidates").rglob("*.parquet")) - known
    new.unlink()
    made.lake.refresh()
    for path in ("/", "/trajectories", "/runs/run", "/operations", "/marks"):
        text = made.client.get(path).text
        assert "Not up to date: candidates: " in text, path
    made.lake.close()
