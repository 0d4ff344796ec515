"""The pages over a small lake: what they show, to whom, and that they escape everything."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
from fastapi.testclient import TestClient
from support.export_lake import ExportLake, turn
from support.inspector import KEY, Inspected, application, inspected
from support.markup import unsafe
from support.run_lake import RUN, RunLake, call, run_lake
from support.small_lake import SmallLake

from clawstream.inspector.queries.lake import COPIES
from clawstream.inspector.queries.overview import CURVE, curve_of
from clawstream.inspector.queries.tokens import MODES
from clawstream.inspector.queries.trajectory import find, state, timeline
from clawstream.inspector.web import app
from clawstream.inspector.web.app import HEADERS, create_app
from clawstream.query.live_lake import LiveLake
from clawstream.schemas.blob_refs import reference
from clawstream.schemas.records import Blob, Candidate, RewardValue
from clawstream.schemas.settings import Settings

PAGES = [
    "/",
    "/runs/run",
    "/runs/run?by=time",
    "/trajectories",
    "/trajectories?run_id=run&text=onerror",
    "/group?run=run&id=g",
    "/marks",
    "/sql?q=<script>alert(1)</script>",
    "/operations",
    "/t/run/evil",
    "/t/run/evil/step/1",
    *(f"/t/run/evil/tokens?by={mode}" for mode in MODES),
]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Inspected:
    return inspected(Settings(data_dir=tmp_path_factory.mktemp("inspector")))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Inspected:
    """Return the pages of a run with versions that were trained on its tokens."""
    run_lake(settings := Settings(data_dir=tmp_path_factory.mktemp("trained")))
    lake = LiveLake(settings, COPIES)
    return application(settings, ExportLake(SmallLake(settings), {}), lake)


def ids_on(text: str) -> list[str]:
    """Return the trajectories that a list shows, in order."""
    return re.findall(r'class="row id" [^>]* href="/t/run/([^"?]+)', text)


class TestEveryPage:
    @pytest.mark.parametrize("path", PAGES)
    def test_escapes_text_of_agents_and_forbids_inline_code(
        self, shown: Inspected, path: str
    ) -> None:
        reply = shown.client.get(path)
        assert reply.status_code == 200
        assert {name: reply.headers[name] for name in HEADERS} == HEADERS
        assert unsafe(reply.text) == []

    @pytest.mark.parametrize("path", PAGES)
    def test_needs_a_key(self, shown: Inspected, path: str) -> None:
        reply = shown.client.get(path, headers={"authorization": "Bearer claw-other"})
        assert reply.status_code == 303
        assert reply.headers["location"].startswith("/login?next=%2F")

    def test_that_does_not_exist_is_not_found(self, shown: Inspected) -> None:
        for path in ("/runs/none", "/group?run=run&id=none", "/t/run/none",
                     "/t/run/g-0/step/9", "/static/..%2fapp.py"):  # fmt: skip
            reply = shown.client.get(path)
            assert reply.status_code == 404 and "Not found" in reply.text

    @pytest.mark.parametrize(
        ("path", "name"),
        [
            ("/group?run=x", "id"), ("/t/run/g-0/step/x", "index"),
            ("/t/run/g-0/tokens?step=zz", "step"), ("/t/run/g-0/tokens?by=zz", "by"),
            ("/runs/run?by=zz", "by"), ("/runs/run/series.json?by=zz", "by"),
            ("/trajectories?version=abc", "version"), ("/trajectories?stage=nope", "stage"),
            ("/trajectories?sort=x", "sort"), ("/trajectories?versoin=3", "versoin"),
            ("/operations?range=100y", "range"), ("/operations?until=soon", "until"),
        ],
    )  # fmt: skip
    def test_names_a_parameter_that_is_wrong(self, shown: Inspected, path: str, name: str) -> None:
        reply = shown.client.get(path)
        assert reply.status_code == 422 and name in reply.text
        assert "Mark all" not in reply.text and "clawstream lag" not in reply.text

    def test_a_form_has_a_greatest_length(self, shown: Inspected) -> None:
        reply = shown.client.post("/sql", data={"q": "x" * 70_000})
        assert reply.status_code == 413 and "at most 65536 bytes" in reply.text


def test_metrics_need_no_key_and_name_no_ids(shown: Inspected) -> None:
    for path in ("/t/run/g-0", "/t/run/none", "/nothing/g-0"):
        shown.client.get(path)
    with pytest.raises(ZeroDivisionError):
        failing(shown).get("/runs/run")
    reply = shown.client.get("/metrics", headers={"authorization": ""})
    assert reply.status_code == 200
    name = "clawstream_inspector_page_seconds_count"
    page = f'{name}{{route="/t/{{run_id}}/{{trajectory_id}}",status="200"}}'
    assert page in reply.text and f'{name}{{route="other",status="404"}}' in reply.text
    assert f'{name}{{route="/runs/{{run_id}}",status="500"}} 1.0' in reply.text
    assert "clawstream_inspector_live_pages 0.0" in reply.text and "g-0" not in reply.text


def failing(shown: Inspected) -> TestClient:
    """Return a client of an application that fails at each query of the lake."""

    class Failing:
        failed: ClassVar[dict[str, str]] = {}

        def rows(self, *_: Any) -> None:
            raise ZeroDivisionError

    parts = shown.parts._replace(lake=cast(Any, Failing()))
    return TestClient(create_app(parts), headers={"authorization": f"Bearer {KEY}"})


def test_all_pages_that_wait_for_changes_are_counted(shown: Inspected) -> None:
    def metrics() -> str:
        return shown.client.get("/metrics").text

    async def wait() -> None:
        async for _ in shown.parts.live.changes():
            async for _ in shown.parts.operations.changes():
                assert "clawstream_inspector_live_pages 2.0" in metrics()
                return

    asyncio.run(wait())
    assert "clawstream_inspector_live_pages 0.0" in metrics()


class TestLogin:
    def test_exchanges_a_key_for_a_strict_cookie(self, shown: Inspected) -> None:
        form = {"key": KEY, "next": "/trajectories?channel=train"}
        reply = shown.client.post("/login", data=form)
        assert (reply.status_code, reply.headers["location"]) == (303, form["next"])
        cookie = reply.headers["set-cookie"]
        assert "HttpOnly" in cookie and "SameSite=strict" in cookie and KEY not in cookie
        name, _, value = cookie.partition(";")[0].partition("=")
        as_browser = {"authorization": "", "cookie": f"{name}={value}"}
        assert shown.client.get("/", headers=as_browser).status_code == 200
        shown.client.post("/logout", headers=as_browser)
        assert shown.client.get("/", headers=as_browser).status_code == 303
        shown.client.cookies.clear()

    def test_inspectors_on_two_ports_have_a_session_each(self, shown: Inspected) -> None:
        names = set()
        for port in (8300, 9000):
            address = f"http://testserver:{port}"
            reply = shown.client.post(f"{address}/login", data={"key": KEY})
            names.add(reply.headers["set-cookie"].partition("=")[0])
            assert shown.client.get(f"{address}/", headers={"authorization": ""}).status_code == 200
        assert len(names) == 2
        shown.client.cookies.clear()

    @pytest.mark.parametrize(
        "target", ["//evil.example", "https://evil.example", "/\\evil.example"]
    )
    def test_leads_to_no_other_site(self, shown: Inspected, target: str) -> None:
        reply = shown.client.post("/login", data={"key": KEY, "next": target})
        assert reply.headers["location"] == "/"
        shown.client.cookies.clear()

    def test_refuses_a_wrong_key_and_forms_of_other_sites(self, shown: Inspected) -> None:
        assert shown.client.post("/login", data={"key": "claw-x"}).status_code == 401
        for header in ({"origin": "https://evil.example"}, {"sec-fetch-site": "cross-site"}):
            for path in ("/login", "/logout", "/theme"):
                assert shown.client.post(path, data={"key": KEY}, headers=header).status_code == 403

    def test_a_link_of_another_site_is_loaded_again(self, shown: Inspected) -> None:
        """A strict cookie comes only with the second request."""
        headers = {"authorization": "", "sec-fetch-site": "cross-site"}
        assert 'http-equiv="refresh"' in shown.client.get("/", headers=headers).text


class TestList:
    @pytest.mark.parametrize(
        ("query", "expected"),
        [
            ({}, {"g-0", "g-1", "h-0", "h-1", "evil"}),
            ({"group_id": "g"}, {"g-0", "g-1"}),
            ({"reward_min": "0.5"}, {"g-0", "evil"}),
            ({"reward_max": "0.2"}, {"g-1"}),
            ({"text": "ONERROR=alert"}, {"evil"}),
            ({"text": "ONERR"}, {"evil"}),
            ({"text": '"img src" script'}, {"evil"}),
            ({"text": '"src img"'}, set()),
            ({"text": "onerror", "run_id": "run", "reward_min": "0.5"}, {"evil"}),
            ({"text": "onerror", "group_id": "g"}, set()),
            ({"text": "6"}, {"g-0", "g-1"}),
            ({"text": "user"}, set()),
            ({"text": "\"'>"}, set()),
            ({"text": 'AND OR NOT NEAR( " * ^ : - \0'}, set()),
            ({"agent": "onerror"}, {"evil"}),
            ({"agent": "m"}, {"g-0", "g-1", "h-0", "h-1", "evil"}),
            ({"task": '"gold":"7"'}, {"g-0", "g-1", "h-0", "h-1", "evil"}),
            ({"task": "H"}, {"h-0", "h-1"}),
            ({"run_id": "other"}, set()),
            ({"stage": "admitted"}, set()),
            ({"stage": "undecided", "channel": "train", "reward_min": "1"}, {"g-0"}),
            ({"quality_min": "0"}, set()),
        ],
    )
    def test_shows_what_the_filters_select(
        self, shown: Inspected, query: dict[str, str], expected: set[str]
    ) -> None:
        text = shown.client.get("/trajectories", params=query).text
        assert set(ids_on(text)) == expected
        assert f'id="total">{len(expected)}<' in text

    def test_says_which_share_of_the_calls_is_not_indexed_yet(self, tmp_path: Path) -> None:
        shown = inspected(Settings(data_dir=tmp_path))
        assert "index of texts" not in shown.client.get("/trajectories?text=zebra").text
        asked = json.dumps({"messages": [{"role": "user", "content": "Zebra?"}]}).encode()
        shown.written.put("new", [replace(turn("new", 0, [1], [2]), request_json=asked)], 1.0, "n")
        assert shown.lake.refresh()
        text = shown.client.get("/trajectories?text=zebra").text
        assert "The index of texts has 90 % of the calls so far." in text and not ids_on(text)
        assert "index of texts" not in shown.client.get("/trajectories?group_id=n").text
        query = {"of": "query", "query": "text=onerror", "trainable": "no", "count": "1",
                 "total": "1", "newest": "1970-01-01T00:00:02"}  # fmt: skip
        reply = shown.client.post("/marks", data=query)
        assert reply.status_code == 422 and "lacks some calls yet" in reply.text
        shown.lake.texts.catch_up()
        text = shown.client.get("/trajectories?text=zebra").text
        assert "index of texts" not in text and ids_on(text) == ["new"]
        assert shown.client.post("/marks", data=query).status_code == 303
        assert [event.trajectory_key for _, _, event in shown.log.events] == ["evil"]
        shown.lake.close()

    def test_pages_follow_each_other(
        self, shown: Inspected, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("clawstream.inspector.queries.listing.PAGE", 2)
        found = _all_rows(shown, "/trajectories?channel=train")
        assert found == sorted(["g-0", "g-1", "h-0", "h-1", "evil"], reverse=True)

    @pytest.mark.parametrize(
        ("sort", "expected"),
        [
            ("-reward", ["g-0", "evil", "g-1", "h-1", "h-0"]),
            ("reward", ["g-1", "evil", "g-0", "h-1", "h-0"]),
            ("-steps", ["g-1", "g-0", "evil", "h-1", "h-0"]),
            ("closed", ["h-1", "h-0", "g-1", "g-0", "evil"]),
        ],
    )
    def test_pages_follow_each_other_in_the_order_of_a_column(
        self, shown: Inspected, monkeypatch: pytest.MonkeyPatch, sort: str, expected: list[str]
    ) -> None:
        monkeypatch.setattr("clawstream.inspector.queries.listing.PAGE", 2)
        assert f"sort={sort}" in shown.client.get(f"/trajectories?sort={sort}").text
        assert _all_rows(shown, f"/trajectories?sort={sort}") == expected


def _all_rows(shown: Inspected, path: str) -> list[str]:
    """Return the trajectories of a list, by following its pages."""
    found: list[str] = []
    while path:
        text = shown.client.get(path, headers={"hx-request": "true"}).text
        found += ids_on(text)
        more = re.search(r'hx-get="([^"]+)"', text)
        path = more[1].replace("&amp;", "&") if more else ""
    return found


class TestTrajectory:
    def test_matches_results_with_calls(self, shown: Inspected) -> None:
        text = shown.client.get("/t/run/evil").text
        assert text.count('id="result-0-') == text.count('id="call-0-') == 1

    def test_a_fork_has_its_own_lane(self, shown: Inspected) -> None:
        lanes = re.findall(r'class="(lane\d)"', shown.client.get("/t/run/g-1").text)
        assert lanes == ["lane0", "lane0", "lane1"]

    def test_a_step_of_an_open_trajectory_is_shown(self, shown: Inspected) -> None:
        shown.written.lake.put("steps", "SS", turn("open", 0, [1], [2]))
        assert shown.lake.refresh()
        text = shown.client.get("/t/run/open").text
        assert "open pulse" in text and 'id="step-0"' in text
        shown_at = re.search(r'sse-connect="/t/run/open/changes\?seen=([^"]+)"', text)
        assert shown_at and text.index("</main>") < shown_at.start()
        assert state(shown.lake, "run", "open") == shown_at[1] == "1-0"
        shown.written.lake.put("steps", "SS", turn("open", 1, [1], [2]))
        assert shown.lake.refresh()
        assert 'id="step-1"' in shown.client.get("/t/run/open").text

    def test_a_group_compares_rewards(self, shown: Inspected) -> None:
        text = shown.client.get("/group?run=run&id=g").text
        assert ids_on(text) == ["g-0", "g-1"]
        assert [">0.5<" in text, ">-0.5<" in text, ">-0.707<" in text] == [True] * 3

    def test_copies_are_commands_of_the_shell(self, shown: Inspected) -> None:
        text = shown.client.get("/t/run/g-0/step/0").text
        assert "curl http://gateway/v1/chat/completions" in text and "def test_step" in text


def test_the_reason_of_a_loss_leads_to_its_trajectories(trained: Inspected) -> None:
    text = trained.client.get("/runs/run").text
    (address,) = re.findall(r'href="([^"]*reason=[^"]*)">zero variance', text)
    listed = trained.client.get(address.replace("&amp;", "&")).text
    assert ids_on(listed) == ["sub-0-1", "sub-0-0"]
    assert "no reward yet</span>" in text and "reason=no" not in text


def test_a_reason_selects_the_trajectories_that_are_lost_by_it(tmp_path: Path) -> None:
    made = inspected(Settings(data_dir=tmp_path))
    absent = RewardValue(
        source="rule", name="a", function_version="1", value=None, reward_revision=0,
        reason="no_answer",
    )  # fmt: skip
    value = replace(absent, name="b", value=1.0, reason=None)
    for key, values in (("lost", (absent,)), ("kept", (absent, value))):
        candidate = Candidate(
            run_id="run", channel="train", trajectory_key=key, trajectory_id=key, group_id=key,
            group_size=1, round=0, revision=0, outcome="completed", opened_at=1000, closed_at=2000,
            rewards=values, prompt_tokens=1, trainable_tokens=1, trainable=True, steps=(),
        )  # fmt: skip
        made.written.lake.put("candidates", "CC", candidate)
    assert made.lake.refresh()
    assert ids_on(made.client.get("/trajectories?reason=no_answer").text) == ["lost"]


def test_a_reference_to_the_blob_store_is_no_request_to_copy(tmp_path: Path) -> None:
    made = inspected(Settings(data_dir=tmp_path))
    blob = reference(Blob(field="request_json", url="s3://b/x", sha256="0" * 64, size_bytes=9))
    made.written.lake.put("steps", "SS", turn("large", 0, [1], [2], request_json=blob))
    assert made.lake.refresh()
    text = made.client.get("/t/run/large/step/0").text
    assert "in the blob store" in text and "Copy as curl" not in text and "s3://b/x" in text


def test_the_funnel_counts_each_step_once(shown: Inspected) -> None:
    from clawstream.inspector.queries.overview import funnel

    stages = {s.name: (s.calls, s.losses) for s in funnel(shown.lake, "run")}
    assert stages["recorded"][0] >= stages["assembled"][0] == 9
    assert stages["rewarded"] == (7, [("no reward yet", 2)])
    assert stages["admitted"] == (0, [("waits for its group", 7)])
    assert stages["trained"] == (0, [])


def test_the_funnel_ends_with_what_the_trainer_did(trained: Inspected) -> None:
    from clawstream.inspector.queries.overview import funnel

    stages = {s.name: (s.calls, s.losses) for s in funnel(trained.lake, "run")}
    assert stages["admitted"][0] == 7
    assert stages["trained"] == (6, [("left out by curation, or by policy 1", 1)])


def test_a_run_whose_training_gets_worse_says_so(tmp_path: Path) -> None:
    lake = run_lake(settings := Settings(data_dir=tmp_path))
    shown = application(settings, ExportLake(lake, {}), LiveLake(settings, COPIES))
    assert "Training gets worse" not in shown.client.get(f"/runs/{RUN}").text
    lake.version(3, reward_fall=0.25)
    assert shown.lake.refresh()
    assert "weight versions is 0.25 below the best" in shown.client.get(f"/runs/{RUN}").text


def test_the_funnel_has_each_reason_of_the_trainer_and_needs_no_reward(tmp_path: Path) -> None:
    from clawstream.inspector.queries.overview import funnel

    made = RunLake(settings := Settings(data_dir=tmp_path))
    steps = [call("sft-0", number, [1, number], [2]) for number in range(4)]
    made.closed("sft-0", steps, None)
    made.batch(0, "sft", [replace(made.member("sft-0", 0, 0.0, 0), rewards=())])
    made.version(0)
    made.version(1)
    reasons = ("cut", "redacted", None, "cut")
    made.decided(1, {s.step_id: why for s, why in zip(steps, reasons, strict=True)})
    lake = LiveLake(settings, COPIES)
    stages = {s.name: (s.calls, s.losses) for s in funnel(lake, "run")}
    assert stages["rewarded"] == stages["admitted"] == (4, [])
    assert stages["trained"] == (1, [("cut", 2), ("redacted", 1)])


def test_a_step_says_why_the_trainer_left_it_out(trained: Inspected) -> None:
    why = "not trained: left out by curation, or by policy 1"
    assert trained.client.get("/t/run/add-0-1").text.count(why) == 1
    assert why not in trained.client.get("/t/run/add-0-0").text


def test_a_trajectory_of_a_skipped_batch_is_trained_into_no_version(tmp_path: Path) -> None:
    made = RunLake(settings := Settings(data_dir=tmp_path))
    steps = [call("a-0-0", 0, [1], [2])]
    made.closed("a-0-0", steps, 1.0)
    made.batch(0, "a-0", [made.member("a-0-0", 0, 1.0, 0)])
    made.version(0)
    made.version(1)
    made.decided(1, {steps[0].step_id: "its batch was skipped"})
    lake = LiveLake(settings, COPIES)
    found = find(lake, "run", "a-0-0")
    assert found is not None
    assert [(v["version_id"], v["trained_steps"]) for v in found.versions] == [("run/1.0", 0)]
    trainer = [m.what for m in timeline(found) if m.where == "trainer"]
    assert trainer == ["no step was trained into run/1.0"]


def test_the_curve_of_a_run_begins_at_its_lowest_value() -> None:
    assert curve_of([(0.0, -1.0), (2.0, 0.5)])[:4] == [0.0, None, 1.5, None]
    assert curve_of([]) == [None] * CURVE


def test_static_files_need_no_key_and_are_named_with_their_licence() -> None:
    static = Path(app.__file__).parent / "static"
    licences = (static / "LICENSES.txt").read_text()
    assert all(name in licences for name in ("htmx 2.0.11", "htmx-ext-sse 2.2.4", "uPlot 1.6.32"))


class TestTokens:
    def test_show_engine_and_trainer(self, trained: Inspected) -> None:
        text = trained.client.get("/t/run/add-0-0/tokens?by=difference").text
        classes = re.findall(r'class="t (\w+)" id="token-', text)
        assert classes == ["dp2", "dp2"]
        assert "trainer -0.5000, difference 0.12 · ratio 0.8825 · advantage 1" in text
        assert "Trained into run/1.0. The trainer's log-probabilities are those of run/0.0." in text
        later = trained.client.get("/t/run/add-1-1/tokens?by=difference").text
        assert "those of run/1.0 after 1 optimizer step, so a difference contains" in later

    def test_say_why_there_is_no_difference(self, trained: Inspected) -> None:
        waits = trained.client.get("/t/run/sub-1-0/tokens?by=difference").text
        assert "No weight version was trained on it yet." in waits
        excluded = trained.client.get("/t/run/add-0-1/tokens?by=difference").text
        assert "The trainer recorded no token of this step" in excluded
