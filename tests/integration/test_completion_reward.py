"""A gateway that is killed between the two records of a completion with a reward.

A topic that is deleted takes no record, so the gateway waits for it, or spools. The next gateway
creates the topic again.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.jobs import RUN, Eventually, Jobs, running
from support.lake import WRITER, column
from support.ports import free_port

from clawstream.runtime.kafka import Cluster
from clawstream.runtime.process.config import overrides_of
from clawstream.schemas.records import Candidate, Reward, SessionEvent
from clawstream.schemas.records.rewards import COMPLETION_NAME
from clawstream.schemas.settings import Settings

GATEWAY = RUN.replace("stream_jobs.{}.main", "gateway.main")
STEP = {
    "prompt_ids": [1], "response_ids": [2], "rollout_log_probs": [-0.5], "trajectory_uid": "t",
    "policy_version": 0,
}  # fmt: skip
DONE = "/complete_trajectory/t"


class Installation:
    """An installation whose gateway may be killed."""

    def __init__(self, jobs: Jobs, eventually: Eventually) -> None:
        self._eventually = eventually
        self.jobs, self.cluster, self.topics = jobs, jobs.cluster, jobs.topics
        self.gateway = self.start_gateway()

    def start_gateway(self) -> subprocess.Popen[bytes]:
        """Start a gateway, which creates missing topics, and wait until it serves."""
        process = self._start("gateway", GATEWAY)
        self._eventually(lambda: self._get("/health"))
        return process

    def start_jobs(self) -> None:
        self.jobs.start()
        self._start("lake", WRITER)

    def _start(self, name: str, code: str) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-c", code, *overrides_of(self.jobs.settings)]
        return self.jobs.processes.start(name, words, stdin=subprocess.DEVNULL)

    def kill_gateway(self) -> None:
        self.gateway.kill()
        self.gateway.wait()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.jobs.settings.gateway.port}"

    def _get(self, path: str) -> bool:
        try:
            return httpx.get(self.url + path).status_code == 200
        except httpx.TransportError:
            return False

    def post(self, path: str, body: Any) -> None:
        assert httpx.post(self.url + path, json=body, timeout=120).status_code in (200, 201)

    def cut_off(self, path: str, body: Any) -> None:
        """Post in the background a request that a kill cuts off."""

        def post() -> None:
            with suppress(httpx.TransportError):
                httpx.post(self.url + path, json=body, timeout=120)

        threading.Thread(target=post, daemon=True).start()

    def records(self, topic: str, kind: type) -> list[Any]:
        if not self.cluster.topics(topic):
            return []
        return [event for _, event in self.jobs.records(topic, kind)]

    def check(self) -> None:
        """Assert that revision 0 has the reward, which is a row of the lake; then correct it."""
        self._eventually(lambda: self.records(self.topics.candidates, Candidate))
        correction = {
            "trajectory_id": "t", "source": "env", "name": COMPLETION_NAME, "value": 0.25,
            "function_version": "1", "reward_revision": 1,
        }  # fmt: skip
        self._eventually(lambda: column(self.jobs.settings, "rewards", "value") == [1.0])
        self.post("/rewards", correction)
        self._eventually(lambda: self.jobs.candidates()["t"].revision > 0)
        made = self.records(self.topics.candidates, Candidate)
        assert [[r.value for r in c.rewards] for c in made] == [[1.0], [0.25]]
        self._eventually(
            lambda: sorted(column(self.jobs.settings, "rewards", "value")) == [0.25, 1.0]
        )
        assert column(self.jobs.settings, "session_events", "rewards") == [[(COMPLETION_NAME, 1.0)]]
        assert column(self.jobs.settings, "dead_letters", "reason") == []


Install = Callable[..., Installation]


@pytest.fixture
def install(
    settings: Settings, cluster: Cluster, tmp_path: Path, eventually: Eventually
) -> Iterator[Install]:
    """Start an installation. gateway: its settings."""
    with running(settings, cluster, tmp_path) as jobs:

        def begin(**gateway: Any) -> Installation:
            more = {"port": free_port(), "upstreams": [], **gateway}
            said = jobs.settings.model_dump(exclude_unset=True)
            lake = {"flush_interval_s": 0.2}
            jobs.settings = Settings.model_validate(said | {"gateway": more, "lake": lake})
            return Installation(jobs, eventually)

        yield begin


@pytest.mark.parametrize("path", [DONE, "/submit_steps"])
def test_a_gateway_killed_after_the_reward_and_before_the_end(
    install: Install, eventually: Eventually, path: str
) -> None:
    """Repeat both requests of a client: its own completion, and Claw-R1's with the last step."""
    last = {"steps": [STEP | {"reward": 1.0, "is_last": True}]}
    requests = [("/submit_steps", last)]
    if path == DONE:
        requests = [("/submit_steps", {"steps": [STEP]}), (DONE, {"reward": 1.0})]
    there = install(produce_timeout_s=100)
    there.cluster.delete_topic(there.topics.steps)
    there.cut_off(*requests[-1])
    eventually(lambda: there.records(there.topics.rewards, Reward))
    there.kill_gateway()
    there.gateway = there.start_gateway()
    assert not there.records(there.topics.steps, SessionEvent)
    for request in requests:
        there.post(*request)
    there.start_jobs()
    there.check()


def test_a_gateway_killed_with_both_records_in_its_spool(
    install: Install, eventually: Eventually
) -> None:
    there = install(produce_timeout_s=1)
    there.post("/submit_steps", {"steps": [STEP]})
    there.cluster.delete_topic(there.topics.rewards)
    there.post(DONE, {"reward": 1.0})
    there.kill_gateway()
    assert not there.records(there.topics.steps, SessionEvent)
    there.gateway = there.start_gateway()
    eventually(lambda: there.records(there.topics.steps, SessionEvent))
    there.start_jobs()
    there.check()
