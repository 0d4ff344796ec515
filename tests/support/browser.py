"""Debian's Chromium before a served inspector: log in, and look for issues with axe-core.

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
from support.inspector import KEY
from support.ports import free_port

from clawstream.inspector.live.feed import Live
from clawstream.inspector.main import serve
from clawstream.inspector.web.app import Parts

playwright = pytest.importorskip("playwright.sync_api")
AXE = Path(playwright.__file__).parents[2] / "axe" / "package" / "axe.min.js"
CHROMIUM = "/usr/bin/chromium"


@contextmanager
def chromium() -> Iterator[Any]:
    """Run the browser."""
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@contextmanager
def serving(parts: Parts, live: Live) -> Iterator[str]:
    """Serve the application in a thread; yields its address."""
    port, loop, stop = free_port(), asyncio.new_event_loop(), asyncio.Event()
    parts = parts._replace(live=live)
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


@contextmanager
def logged_in(browser: Any, address: str, scheme: str = "light", key: str = KEY) -> Iterator[Any]:
    """Yield a page behind the login form; fails on any message of the browser's console."""
    context, said = browser.new_context(color_scheme=scheme), list[str]()
    page = context.new_page()
    page.on(
        "console", lambda message: None if _is_abort(message.text) else said.append(message.text)
    )
    page.on("pageerror", lambda error: said.append(str(error)))
    for _ in range(100):  # until it listens
        try:
            page.goto(f"{address}/trajectories?channel=train", wait_until="domcontentloaded")
            break
        except playwright.Error:
            page.wait_for_timeout(100)
    page.wait_for_selector("#key:focus")  # typed earlier, Chromium reports a blocked autofocus
    page.fill("#key", key)
    page.click("text=Log in")
    page.wait_for_url("**/trajectories?channel=train")
    yield page
    assert not said, said
    context.close()


def _is_abort(text: str) -> bool:
    """Return whether htmx says that a person has cancelled a request."""
    return text.startswith(("htmx:sendAbort", "htmx:afterRequest"))


def violations(page: Any) -> list[str]:
    """Return the serious issues that axe-core finds on a page."""
    page.evaluate(AXE.read_text())
    found = page.evaluate("axe.run()")["violations"]
    return [f"{v['id']}: {v['nodes'][0]['html']}" for v in found if v["impact"] != "minor"]
