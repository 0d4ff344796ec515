"""Make the pictures of `docs/inspector.md`: seven pages in light and dark, 1180 pixels wide.

    PYTHONPATH=.:tests:.cache/browser python tests/browser/screenshots.py docs/images [PAGE...]

The lake is written for the pictures: a run that learns to look up prices, as `make demo` does. So
are the observations of its processes.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from support.browser import chromium, logged_in, serving
from support.inspector import Inspected, application
from support.run_lake import RUN, RunLake, call, tool_call

from clawstream.inspector.live.feed import Live
from clawstream.inspector.operations.observation import (
    Consumer,
    Disk,
    Observation,
    Process,
    Spool,
    Weights,
    Worker,
)
from clawstream.inspector.queries.lake import COPIES
from clawstream.query.live_lake import LiveLake
from clawstream.schemas import records
from clawstream.schemas.settings import Settings
from clawstream.schemas.tokens import pack_logprobs

BEGAN_MS = 1_790_000_000_000
GROUPS, MEMBERS = 28, 4
AFTER_MS = {"steps": 1150, "trajectories": 1400, "candidates": 1450}
WORDS = ["", "the ", "price ", "total ", "is ", "look", "up", "(", '"', "k", ")", ". ", "so "]
WORDS += [f"{n} " for n in range(300)]
WORDS[14], WORDS[15] = "of k ", "plus "
QUERY = """SELECT oldest_sync_index AS version, avg(r.value) AS reward
FROM (SELECT *, unnest(rewards) AS r FROM candidates) GROUP BY 1 ORDER BY 1"""
PAGES = {
    "run": f"/runs/{RUN}?by=version",
    "list": f"/trajectories?run_id={RUN}&channel=train",
    "group": f"/group?run={RUN}&id=s0-g14",
    "trajectory": f"/t/{RUN}/s0-g14-1",
    "tokens": f"/t/{RUN}/s0-g14-1/tokens?step=1",
    "query": "/sql",
    "operations": "/operations?range=15m&until=2026-09-21T14:27:30",
}
TOPICS = {
    "claw-assemble": ("claw.steps", "claw.rewards"),
    "claw-reward": ("claw.trajectories",),
    f"claw-admit.{RUN}.train": ("claw.candidates",),
    f"claw-trainer.{RUN}.train": (f"claw.ready-batches.{RUN}.train",),
    "claw-lake": ("claw.steps", "claw.trajectories", "claw.candidates"),
}
REMEDY = "reward (pid 4242) is suspended by a signal: kill -CONT 4242"


class DemoLake(RunLake):
    """A lake whose records have the times of a day. at_ms: when the next trajectory opens."""

    at_ms = BEGAN_MS

    def put(self, name: str, topic_id: str, *given: Any, **more: Any) -> int:
        """Append records with log times after `at_ms`."""
        self.began_ms = self.at_ms + AFTER_MS.get(name, 2000) - self.next.get(topic_id, 0)
        times = {"opened_at": self.at_ms, "closed_at": self.at_ms + 1300}
        made = [replace(r, **times) if hasattr(r, "closed_at") else r for r in given]
        return super().put(name, topic_id, *made, **more)


def write(settings: Settings) -> None:
    """Write groups of rollouts, their batches and the versions trained on them."""
    lake, r = DemoLake(settings), random.Random(3)
    lake.version(0)
    for number in range(GROUPS):
        group, key, plus, price = f"s0-g{number}", r.randrange(90), r.randrange(1, 9), 1 + number
        members = []
        for index in range(MEMBERS):
            lake.at_ms = BEGAN_MS + number * 30_000 + index * r.randrange(1500, 3500)
            version = max(0, number - index % 2)
            right = r.random() < 0.2 + 0.75 * number / GROUPS
            reward = 1.0 if right else r.choice([0.0, 0.1])
            name = f"{group}-{index}"
            steps = _steps(r, lake.at_ms, name, version, 100 + key, plus, price, right)
            lake.closed(name, steps, reward, version)
            members.append(lake.member(name, number, reward, version))
        lake.batch(number, group, members)
        lake.at_ms += 9000
        lake.version(number + 1, logp_max_abs_diff_same_version=0.002)


def _steps(
    r: random.Random,
    at_ms: int,
    name: str,
    version: int,
    key: int,
    plus: int,
    price: int,
    right: bool,
) -> list[records.Step]:
    asked = {"role": "user", "content": f"What is the price of k{key} plus {plus}?"}
    call_json = tool_call("lookup", key=f"k{key}")
    result = {"role": "tool", "tool_call_id": "c", "content": str(price)}
    answer = price + plus if right else r.randrange(1, 99)
    first = [5, 6, 7, 8, 9, 13 + key, 8, 10]
    last = [1, 2, 14, 13 + key, 4, 13 + price, 11, 13 + price, 15, 13 + plus, 4, 13 + answer, 11]
    last += [12, 1, 3, 4, 13 + answer, 11]
    text = f"the price of k {key} is {price} . {price} plus {plus} is {answer} . "
    said = {"role": "assistant", "content": f"{text}so the total is {answer} ."}
    at = at_ms * 1000
    requests = [[asked], [asked, json.loads(call_json), result]]
    replies = [call_json, json.dumps(said).encode()]
    made = []
    prompt = list(range(20, 39))
    for number, tokens in enumerate((first, last)):
        step = call(name, number, prompt, tokens, version)
        logprobs = [-r.expovariate(1 + version / 4) for _ in tokens]
        more: dict[str, Any] = {
            "request_json": json.dumps({"messages": requests[number], "tools": _TOOLS}).encode(),
            "response_json": replies[number], "response_logprobs": pack_logprobs(logprobs),
            "received_at": at + number * 700_000, "finished_at": at + number * 700_000 + 400_000,
            "finish_reason": "stop" if number else "tool_calls",
        }  # fmt: skip
        made.append(replace(step, **more))
        prompt = [*prompt, *tokens, 13 + price]
    return made


_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "lookup", "description": "The price of an article.",
            "parameters": {"type": "object", "properties": {"key": {"type": "string"}}},
        },
    }
]  # fmt: skip


def observe(made: Inspected) -> None:
    """Let the watcher see fourteen minutes of the run; the reward job stops for the last 25 s."""
    r = random.Random(5)
    for second in range(0, GROUPS * 30, 5):
        at_s, late_s = BEGAN_MS / 1000 + second, max(0, second - GROUPS * 30 + 30)
        found = []
        for group, topics in TOPICS.items():
            stalled = group == "claw-reward" and late_s > 15
            busy = group == f"claw-trainer.{RUN}.train" and second % 30 < 20
            for topic in topics:
                waiting_s = late_s if stalled else second % 30 if busy else r.random() * 2
                records = late_s // 2 if stalled else int(busy) or r.randrange(3)
                status = "stalled" if stalled else "ok"
                place = 0 if stalled else len(found)
                found.insert(
                    place, Consumer(group, topic, records, True, waiting_s, status, stalled)
                )
        newest, is_new = second // 30, int(second % 30 < 6)
        served = [newest, newest - is_new]
        workers = [
            Worker(f"gpu-{i}", "ready", f"{RUN}/{v}.0", newest - v, 1.0, 2.0, 0, None)
            for i, v in enumerate(served)
        ]
        problems = [
            (f"{c.status}: {c.group} does not read {c.topic}: {c.records} records wait", REMEDY)
            for c in found
            if c.is_problem
        ]
        made.observed.observation = Observation(
            at_s, None, problems, found, _processes(), workers,
            Weights(f"{RUN}/{newest}.0", time.time() - 11), 0, Disk(61 << 30, 200 << 30),
            Spool(0, 0, 0),
        )  # fmt: skip
        made.parts.operations.take(made.observed.observation)


def _processes() -> list[Process]:
    names = ("broker", "gateway", "assemble", "reward", "admit", "lake", "trainer", "rollout")
    texts = {"gateway": "http://127.0.0.1:8080", "broker": "127.0.0.1:9092"}
    return [
        Process(
            name, "running", True, False, int(name == "rollout"), texts.get(name, ""), None,
            name == "reward",
        )
        for name in names
    ]  # fmt: skip


def main(out: Path, names: Collection[str]) -> None:
    """Write the pictures of pages to a directory."""
    with tempfile.TemporaryDirectory() as directory:
        settings = Settings(data_dir=Path(directory))
        write(settings)
        lake = LiveLake(settings, COPIES)
        made = application(settings, None, lake)  # type: ignore[arg-type]
        observe(made)
        parts = made.parts._replace(pieces=lambda _, ids: [WORDS[i % len(WORDS)] for i in ids])
        with chromium() as browser, serving(parts, Live(lake)) as address:
            for scheme in ("light", "dark"):
                with logged_in(browser, address, scheme) as page:
                    page.set_viewport_size({"width": 1180, "height": 620})
                    for name in names:
                        page.goto(address + PAGES[name], wait_until="domcontentloaded")
                        if name == "query":
                            page.fill("#search", QUERY)
                            page.click("#run")
                            page.wait_for_selector("#result .plot canvas")
                        if name in ("run", "operations"):
                            page.wait_for_selector("canvas")
                        end = "" if scheme == "light" else "-dark"
                        path = out / f"inspector-{name}{end}.png"
                        page.screenshot(path=path, full_page=name == "operations")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or PAGES)
