"""The inspector in Debian's Chromium: the way from the runs to a token, live, without complaints.

`make test-browser` installs what it needs.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.export_lake import turn
from support.inspector import KEY, Inspected, inspected
from support.ports import free_port

from inspector.live.feed import Live, follower
from inspector.main import serve
from runtime.kafka import Cluster
from runtime.topics.records import create_topics
from schemas.codec.single_object import Codec
from schemas.settings import Settings

playwright = pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.browser
AXE = Path(playwright.__file__).parents[2] / "axe" / "package" / "axe.min.js"
CHROMIUM = "/usr/bin/chromium"


@contextmanager
def serving(made: Inspected, live: Live) -> Iterator[str]:
    """Serve the application in a thread; yields its address."""
    port, loop, stop = free_port(), asyncio.new_event_loop(), asyncio.Event()
    parts = made.parts._replace(live=live)
    thread = threading.Thread(
        target=lambda: loop.run_until_complete(serve(parts, live, "127.0.0.1", port, stop))
    )
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@contextmanager
def logged_in(browser: Any, address: str, scheme: str = "light") -> Iterator[Any]:
    """Yield a page behind the login form; fails on any message of the browser's console."""
    context, said = browser.new_context(color_scheme=scheme), list[str]()
    page = context.new_page()
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    for _ in range(100):  # until it listens
        try:
            page.goto(f"{address}/trajectories?channel=train", wait_until="domcontentloaded")
            break
        except playwright.Error:
            page.wait_for_timeout(100)
    page.fill("#key", KEY)
    page.click("text=Log in")
    page.wait_for_url("**/trajectories?channel=train")
    yield page
    assert said == []
    context.close()


def violations(page: Any) -> list[str]:
    """Return the serious issues that axe-core finds on a page."""
    page.evaluate(AXE.read_text())
    found = page.evaluate("axe.run()")["violations"]
    return [f"{v['id']}: {v['nodes'][0]['html']}" for v in found if v["impact"] != "minor"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_way_to_a_token(browser: Any, tmp_path: Path, scheme: str) -> None:
    made = inspected(Settings(data_dir=tmp_path))
    with serving(made, Live(made.lake)) as address, logged_in(browser, address, scheme) as page:
        assert not violations(page)
        page.keyboard.press("/")
        page.keyboard.type("onerror")
        page.keyboard.press("Enter")
        page.wait_for_url("**text=onerror**")
        assert page.inner_text("#total") == "1"
        page.goto(f"{address}/trajectories?group_id=g")
        page.keyboard.press("j")
        page.keyboard.press("Enter")
        page.wait_for_url("**/t/run/g-1")
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
        for path in ("/", "/runs/run", "/t/run/evil", "/t/run/evil/step/0"):
            page.goto(f"{address}{path}", wait_until="domcontentloaded")
            assert not violations(page), path
        page.click(f"button[value={'dark' if scheme == 'light' else 'light'}]")
        assert page.get_attribute("html", "data-theme") != "auto"


def test_a_call_appears_while_it_is_open(
    browser: Any, settings: Settings, cluster: Cluster
) -> None:
    create_topics(cluster, settings)
    made = inspected(settings)
    live = Live(made.lake, follower(cluster, settings))
    producer, codec = cluster.producer(), Codec()
    with serving(made, live) as address, logged_in(browser, address) as page:
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
    with serving(made, Live(made.lake)) as address, logged_in(browser, address) as page:
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
