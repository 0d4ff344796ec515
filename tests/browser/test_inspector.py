"""The inspector in Debian's Chromium: pages, marks, policies and queries, live, without complaints.

`make test-browser` installs what it needs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.browser import logged_in, serving, violations
from support.export_lake import turn
from support.inspector import inspected
from support.jobs import reward, running, session, step

from clawstream.cli.lake.inspect import parts_of
from clawstream.inspection.sandboxed_sql import AT_ONCE
from clawstream.inspector.live.feed import Follower, Live
from clawstream.runtime.kafka import Cluster
from clawstream.runtime.process.config import with_values
from clawstream.runtime.topics.records import create_topics
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.records import ReadyBatch
from clawstream.schemas.settings import Settings

pytestmark = pytest.mark.browser


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_way_to_a_token(browser: Any, tmp_path: Path, scheme: str) -> None:
    made = inspected(Settings(data_dir=tmp_path))
    with (
        serving(made.parts, Live(made.lake)) as address,
        logged_in(browser, address, scheme) as page,
    ):
        assert not violations(page)
        page.keyboard.press("/")
        page.keyboard.type("onerror")
        page.keyboard.press("Enter")
        page.wait_for_url("**text=onerror**")
        assert page.inner_text("#total") == "1"
        page.goto(f"{address}/trajectories?group_id=g")
        page.click("th >> text=Reward")
        page.wait_for_url("**sort=-reward**")
        assert page.locator("th[aria-sort=descending]").inner_text().startswith("Reward")
        assert not violations(page)
        page.keyboard.press("j")
        page.keyboard.press("Enter")
        page.wait_for_url("**/t/run/g-0?list=*")
        page.keyboard.press("u")
        page.wait_for_url("**/trajectories?group_id=g&sort=-reward")
        page.goto(f"{address}/t/run/g-1")
        assert not violations(page)
        page.keyboard.press("j")
        page.keyboard.press("j")
        page.keyboard.press("t")
        page.wait_for_url("**/tokens?step=1")
        page.keyboard.press("ArrowRight")
        assert "log p -1.0" in page.inner_text("#token-facts")
        assert not violations(page)
        page.keyboard.press("u")
        page.wait_for_url("**/t/run/g-1#step-1")
        page.keyboard.press("g")
        page.wait_for_url("**/group?run=run&id=g")
        assert not violations(page)
        pages = ("/", "/runs/run", "/calls", "/t/run/evil", "/t/run/evil/step/0", "/marks", "/sql")
        for path in (*pages, "/t/run/g-1/tokens?by=difference"):
            page.goto(f"{address}{path}", wait_until="domcontentloaded")
            assert not violations(page), path
        page.click(f"button[value={'dark' if scheme == 'light' else 'light'}]")
        assert page.get_attribute("html", "data-theme") != "auto"


def test_marks_are_made_and_taken_back_by_keyboard(browser: Any, tmp_path: Path) -> None:
    made = inspected(Settings(data_dir=tmp_path))
    with serving(made.parts, Live(made.lake)) as address, logged_in(browser, address) as page:
        page.goto(f"{address}/t/run/g-0")
        page.keyboard.press("m")
        assert not violations(page)
        page.keyboard.type("no")
        page.fill(".head [name=tags]", "loop")
        page.keyboard.press("Enter")
        page.wait_for_selector(".head .chip >> text=not trainable")
        page.wait_for_selector("#marks >> text=ann")
        assert not violations(page)
        page.click("#marks >> text=Undo")
        page.wait_for_selector("#marks .undone >> text=taken back by ann")
        assert page.locator(".head .chip").count() == 0
        page.goto(f"{address}/trajectories?group_id=g")
        page.click("summary >> text=Mark all 2")
        form = page.locator("details.mark form")
        form.locator("[name=quality]").fill("0.5")
        page.keyboard.press("Enter")  # the number is not typed yet
        assert page.locator(".chip").count() == 0
        form.locator("[name=count]").fill("2")
        page.keyboard.press("Enter")
        page.wait_for_selector("tr:nth-child(2) .chip >> text=quality 0.5")
        page.goto(f"{address}/marks")
        page.click("tr >> nth=1 >> text=Undo")
        page.wait_for_selector("tr.undone >> text=and 1 more")
        assert [type(event).__name__ for _, _, event in made.log.events] == ["Curation"] * 6


def test_a_key_marks_the_row_that_has_the_focus_and_nothing_else(
    browser: Any, tmp_path: Path
) -> None:
    made = inspected(Settings(data_dir=tmp_path))
    with serving(made.parts, Live(made.lake)) as address, logged_in(browser, address) as page:
        page.goto(f"{address}/trajectories?group_id=g&sort=-reward")
        page.keyboard.press("m")
        assert page.locator("details[open], dialog[open]").count() == 0, "no row has the focus"
        page.keyboard.press("j")
        page.keyboard.press("j")
        page.keyboard.press("m")
        page.wait_for_selector("#mark-row[open] >> text=g-1")
        assert not violations(page)
        page.keyboard.press("Escape")
        page.wait_for_selector("#mark-row", state="hidden")
        page.keyboard.press("m")
        page.fill("#mark-row [name=quality]", "0.5")
        page.keyboard.press("Enter")
        page.wait_for_selector("tr:nth-child(2) .chip >> text=quality 0.5")
        assert page.evaluate("document.activeElement.dataset.trajectory") == "g-1"
        assert [event.trajectory_key for _, _, event in made.log.events] == ["g-1"]
        page.click("summary >> text=Mark all 2")
        page.keyboard.press("Tab")
        page.keyboard.press("Escape")
        assert page.locator("details[open]").count() == 0


def test_the_way_back_leads_to_the_row(
    browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clawstream.inspector.queries.listing.PAGE", 2)
    made = inspected(Settings(data_dir=tmp_path))
    with serving(made.parts, Live(made.lake)) as address, logged_in(browser, address) as page:
        page.goto(f"{address}/trajectories?channel=train&rows=2")
        page.click("text=More")
        page.wait_for_url("**rows=4**")
        page.locator("a.row >> nth=3").focus()
        name = page.evaluate("document.activeElement.dataset.trajectory")
        page.keyboard.press("Enter")
        page.wait_for_selector(".chat")
        page.go_back()
        page.wait_for_selector("a.row >> nth=3")
        assert page.evaluate("document.activeElement.dataset.trajectory") == name


def test_a_query_ends_when_it_is_cancelled(browser: Any, tmp_path: Path) -> None:
    made = inspected(Settings(data_dir=tmp_path))
    with serving(made.parts, Live(made.lake)) as address, logged_in(browser, address) as page:
        page.goto(f"{address}/sql")
        for _ in range(AT_ONCE + 1):  # each has a place: the one before has ended
            page.fill("#search", "SELECT count(*) FROM range(1000000000) a, range(1000000000) b")
            page.click("#run")
            page.click("#cancel")
            page.wait_for_selector("#cancel", state="hidden")
        page.fill("#search", "SELECT 7 AS n")
        page.click("#run")
        page.wait_for_selector("#result td >> text=7")


def test_a_query_draws_a_chart(browser: Any, tmp_path: Path) -> None:
    made = inspected(Settings(data_dir=tmp_path))
    with serving(made.parts, Live(made.lake)) as address, logged_in(browser, address) as page:
        page.goto(f"{address}/sql")
        page.fill(
            "#search", "SELECT step_index, count(*) AS steps FROM steps GROUP BY 1 ORDER BY 1"
        )
        page.keyboard.press("Control+Enter")
        page.wait_for_selector("#result .plot canvas")
        assert page.inner_text("#rows") == "3" and "q=SELECT" in page.url
        page.hover("#result .u-over")
        page.wait_for_selector("#result output:has-text('1: ')")
        page.click("details.view >> nth=0")
        page.click("button.insert >> nth=0")
        column = page.inner_text("button.insert >> nth=0")
        assert page.input_value("#search").endswith(column)
        assert not violations(page)
        page.fill("#search", "SELECT colour FROM steps")
        page.click("#run")
        page.wait_for_selector("#result >> text=colour")
        assert not violations(page)


def test_a_mark_and_a_policy_change_what_is_trained(
    browser: Any, settings: Settings, cluster: Cluster, tmp_path: Path, eventually: Any
) -> None:
    settings = with_values(
        settings,
        {
            "run_id": "run", "lake.flush_interval_s": 0.2, "admit.channels": ["train"],
            "admit.policy": {
                "group_size": 1, "min_members": 1, "batch_groups": 2, "algorithm": "reinforce_pp",
            },
        },
    )  # fmt: skip
    with running(settings, cluster, tmp_path / "logs") as jobs:
        for job in ("assemble", "admit", "lake"):
            jobs.start(job=job)
        journal = jobs.topics.ready_batches("run", "train")

        def play(*keys: str) -> None:
            for key in keys:
                opened = session(key, "opened", group_id=key, group_size=1)
                done = session(key, "completed")
                jobs.put(opened, step(key, [1], [2, 3]), reward(key, 1.0), done)
            jobs.producer.flush()

        def batches() -> list[list[str]]:
            found = jobs.records(journal, ReadyBatch) if journal in cluster.topics() else []
            return [[m.trajectory_id for g in b.groups for m in g.members] for _, b in found]

        play("bad")
        parts, live, key = parts_of(jobs.settings)
        with serving(parts, live) as address, logged_in(browser, address, key=str(key)) as page:
            eventually(parts.marks.connected)
            eventually(lambda: parts.lake.rows("SELECT 1 FROM closed"))
            page.goto(f"{address}/t/run/bad")
            page.keyboard.press("m")
            page.keyboard.type("no")
            page.click(".head details.mark button")
            page.wait_for_selector(".head .chip >> text=not trainable")
            eventually(lambda: not jobs.candidates()["bad"].trainable)
            play("good-1", "good-2")
            assert sorted(eventually(batches)[0]) == ["good-1", "good-2"]

            page.goto(f"{address}/runs/run/policy")
            page.fill("[name=batch_groups]", "1")
            page.click("text=Preview")
            page.wait_for_selector("#preview")
            assert not violations(page)
            page.click("#save")
            page.wait_for_selector("h1 >> text=Admission policy 2")
            play("good-3")
            assert eventually(lambda: batches()[1:]) == [["good-3"]]


def test_a_call_appears_while_it_is_open(
    browser: Any, settings: Settings, cluster: Cluster
) -> None:
    create_topics(cluster, settings)
    made = inspected(settings)
    live = Live(made.lake, Follower(cluster, settings))
    producer, codec = cluster.producer(), Codec()
    with serving(made.parts, live) as address, logged_in(browser, address) as page:
        page.goto(f"{address}/", wait_until="domcontentloaded")
        page.wait_for_selector(".feed li")
        step = turn("fresh", 0, [1], [2])
        producer.put(settings.kafka.topics.steps, b"fresh", codec.encode(step))
        producer.flush()
        page.wait_for_selector(".feed >> text=fresh")
        assert "from Kafka" in page.inner_text(".live h2")
        assert page.inner_text(".feed li:first-child .state") == "open"
    producer.close()


def test_an_open_trajectory_loads_again_only_for_its_own_steps(
    browser: Any, tmp_path: Path
) -> None:
    made = inspected(Settings(data_dir=tmp_path))
    made.written.lake.put("steps", "SS", turn("open", 0, [1], [2]))
    made.lake.refresh()
    with serving(made.parts, Live(made.lake)) as address, logged_in(browser, address) as page:
        loads: list[str] = []
        page.on("request", lambda r: loads.append(r.url) if r.url.endswith("/t/run/open") else None)
        page.goto(f"{address}/t/run/open", wait_until="domcontentloaded")
        page.wait_for_selector("#step-0")
        made.written.lake.put("steps", "SS", turn("other", 0, [1], [2]))
        page.wait_for_timeout(3000)
        assert len(loads) == 1
        made.written.lake.put("steps", "SS", turn("open", 1, [1], [2]))
        page.wait_for_selector("#step-1")
        page.wait_for_timeout(1500)
        assert len(loads) == 2
