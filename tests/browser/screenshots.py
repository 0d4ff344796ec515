"""Make the pictures of `docs/inspector.md`: six pages in light and dark, 1180 pixels wide.

    PYTHONPATH=.:tests:.cache/browser python tests/browser/screenshots.py docs/images

The lake is written for the pictures: a run that learns to look up prices, as `make demo` does.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from browser.test_inspector import CHROMIUM, logged_in, playwright, serving
from support.inspector import application
from support.run_lake import RUN, RunLake, call, tool_call

from clawstream.query.live_lake import Copy, LiveLake
from inspector.live.feed import Live
from inspector.queries.lake import COPIES
from schemas import records
from schemas.settings import Settings
from schemas.tokens import pack_logprobs

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
}


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


def main(out: Path) -> None:
    """Write the pictures to a directory."""
    with tempfile.TemporaryDirectory() as directory:
        settings = Settings(data_dir=Path(directory))
        write(settings)
        lake = LiveLake(settings, {name: Copy(*copy) for name, copy in COPIES.items()})
        made = application(settings, None, lake)  # type: ignore[arg-type]
        parts = made.parts._replace(pieces=lambda _, ids: [WORDS[i % len(WORDS)] for i in ids])
        with playwright.sync_playwright() as driver, serving(parts, Live(lake)) as address:
            chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            for scheme in ("light", "dark"):
                with logged_in(chromium, address, scheme) as page:
                    page.set_viewport_size({"width": 1180, "height": 620})
                    for name, path in PAGES.items():
                        page.goto(address + path, wait_until="domcontentloaded")
                        if name == "query":
                            page.fill("#search", QUERY)
                            page.click("#run")
                            page.wait_for_selector("#result .plot canvas")
                        if name == "run":
                            page.wait_for_selector("canvas")
                        end = "" if scheme == "light" else "-dark"
                        page.screenshot(path=out / f"inspector-{name}{end}.png")
            chromium.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
