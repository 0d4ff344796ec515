"""The operations page in Chromium, over a real `clawstream up` and over a lake alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from support.browser import logged_in, serving, violations
from support.inspector import OBSERVED, inspected
from support.model_endpoint import chat, model_endpoint
from support.ports import free_port
from support.up import up

from clawstream.cli.lake.inspect import parts_of
from clawstream.inspector.live.feed import Live
from clawstream.runtime.kafka import Cluster
from clawstream.runtime.process.config import with_values
from clawstream.schemas.settings import Settings

pytestmark = pytest.mark.browser


def test_a_suspended_job_is_named_with_its_remedy_and_recovers(
    browser: Any, settings: Settings, cluster: Cluster, eventually: Any
) -> None:
    port = free_port()
    url, prefix = f"http://127.0.0.1:{port}", settings.kafka.topic_prefix
    with model_endpoint(lambda _: chat("hi")) as engine:
        settings = with_values(
            settings,
            {
                "run_id": "run", "lake.flush_interval_s": 1.0, "gateway.port": port,
                "gateway.upstreams": [engine.url],
                "up.processes": ["gateway", "assemble", "lake"],
            },
        )  # fmt: skip

        def call(number: int) -> None:
            body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
            path = f"{url}/k{number}/g/v1/chat/completions"
            httpx.post(path, json=body, timeout=60).raise_for_status()

        with up(settings) as started:
            names = settings.up.processes
            started.until(
                lambda: all(started.table.get(n, {}).get("ready") for n in names), "all are ready"
            )
            for number in range(4):
                call(number)
            eventually(lambda: cluster.committed(f"{prefix}-assemble"))
            parts, live, key = parts_of(settings)
            with serving(parts, live) as address, logged_in(browser, address, key=str(key)) as page:
                page.keyboard.press("o")
                page.wait_for_url("**/operations")
                row = page.locator(f"tr:has-text('{prefix}-assemble'):has-text('.steps')")
                row.locator("text=ok").wait_for()
                page.wait_for_selector("[data-name=calls] canvas")
                page.wait_for_selector(f"[data-name=lag_seconds] .u-legend >> text={prefix}-lake")
                assert "no problem" in page.inner_text("[role=status]")
                assert not violations(page)

                job = psutil.Process(started.table["assemble"]["pid"])
                job.suspend()
                for number in range(4):
                    call(number)
                page.wait_for_selector(".problems >> text=does not read", timeout=60_000)
                shown = page.inner_text(".problems li:first-child")
                assert f"{prefix}-assemble does not read {settings.kafka.topics.steps}" in shown
                assert f"kill -CONT {job.pid}" in shown
                first = page.inner_text("[sse-swap=consumers] tr:first-child")
                assert f"{prefix}-assemble" in first
                assert first.split()[0] in ("stopped", "stalled")
                assert not violations(page)

                job.resume()
                page.wait_for_selector("[role=status] >> text=no problem", timeout=60_000)
                row.locator("text=ok").wait_for()
                page.wait_for_selector(".problems", state="detached")
            started.stop()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_ranges_have_permanent_addresses(browser: Any, tmp_path: Path, scheme: str) -> None:
    made = inspected(Settings(data_dir=tmp_path))
    with (
        serving(made.parts, Live(made.lake)) as address,
        logged_in(browser, address, scheme) as page,
    ):
        page.goto(f"{address}/operations?range=15m&until=1970-01-01T00:15:00")
        page.wait_for_selector("[data-name=calls] canvas")
        page.wait_for_selector("[data-name=lag_seconds] >> text=Nothing in this time")
        assert "No broker answers" in page.inner_text("#main")
        assert not violations(page)
        made.observed.observation = OBSERVED
        page.wait_for_selector(".problems >> text=kill -CONT 7")
        assert not violations(page)
        page.click("text=earlier")
        page.wait_for_url("**/operations?range=15m&until=1970-01-01T00:00:00")
        page.click("text=now")
        page.wait_for_url("**/operations?range=15m")
        page.click("text=permalink")
        page.wait_for_url("**/operations?range=15m&until=20**")
