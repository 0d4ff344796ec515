"""The inspector over a small lake: the application without a server or a broker."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import partial

from fastapi.testclient import TestClient
from support.export_lake import ExportLake, export_lake, turn

from clawstream.inspection.policies import RunPolicies
from clawstream.inspection.sandboxed_sql import SandboxedSql
from clawstream.inspector.live.feed import Live
from clawstream.inspector.marks.mark import Event
from clawstream.inspector.marks.writer import MarkWriter
from clawstream.inspector.metrics import PageMetrics
from clawstream.inspector.operations.observation import (
    Consumer,
    Disk,
    Observation,
    Process,
    Spool,
    Weights,
    Worker,
)
from clawstream.inspector.operations.watcher import Watcher
from clawstream.inspector.queries.activity import Activity
from clawstream.inspector.queries.lake import COPIES
from clawstream.inspector.web.access import User
from clawstream.inspector.web.app import Parts, create_app
from clawstream.query.live_lake import LiveLake
from clawstream.runtime.topics.records import cluster_of
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.conversation import chat_of
from clawstream.schemas.records import Curation, Reward
from clawstream.schemas.settings import Settings

KEY, CURATOR_KEY = "claw-test", "claw-curator"
USERS = {
    KEY: User("ann", frozenset({"admin"})),
    CURATOR_KEY: User("bob", frozenset({"curate"})),
}
HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>"


QUERIES: list[SandboxedSql] = []
"""Of the applications of a test module: tests/unit/inspector/conftest.py ends their processes."""


@dataclass
class Inspected:
    """An application, its lake, a client that has a key, the log of its marks, and what the watcher
    observes."""

    settings: Settings
    written: ExportLake
    lake: LiveLake
    parts: Parts
    client: TestClient
    log: InMemoryLog
    observed: Observed

    def restarted(self) -> Inspected:
        """Return another process over the same lake: it remembers no marks."""
        return application(self.settings, self.written, self.lake)


def hostile_lake(settings: Settings) -> ExportLake:
    """Write the groups g and h, and a trajectory in whose every text is markup."""
    made = export_lake(settings)
    call = {"id": HOSTILE, "type": "function", "function": {"name": HOSTILE, "arguments": HOSTILE}}
    tool = {"type": "function", "function": {"name": HOSTILE, "description": HOSTILE}}
    asked = [{"role": "user", "content": HOSTILE}]
    reply = {"role": "assistant", "content": HOSTILE, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": HOSTILE, "content": HOSTILE}
    requests = [{"messages": asked, "tools": [tool]}, {"messages": [*asked, reply, result]}]
    steps = [
        replace(
            turn("evil", number, [1], [2, 3 + number]),
            request_json=json.dumps(request).encode(),
            response_json=json.dumps(reply).encode(),
            user_agent=HOSTILE,
            finish_reason=HOSTILE,
        )
        for number, request in enumerate(requests)
    ]
    made.put("evil", steps, 0.5, HOSTILE)
    return made


class InMemoryLog:
    """A producer in memory. `events` has all records, with the topic and key that they were put to.

    connected: False: no broker answers.
    """

    def __init__(self) -> None:
        self.events: list[tuple[str, bytes | None, Event]] = []
        self.connected = True
        self._codec = Codec()

    def is_connected(self) -> bool:
        return self.connected

    def put(self, topic: str, key: bytes | None, value: bytes | None) -> None:
        event = self._codec.decode(value)
        assert isinstance(event, Curation | Reward)
        self.events.append((topic, key, event))

    def flush(self, timeout_s: float = 0.0) -> None:
        """Every record is acknowledged already."""


class Observed:
    """Observes what it is given."""

    def __init__(self, observation: Observation) -> None:
        self.observation = observation

    def __call__(self) -> Observation:
        return self.observation

    def close(self) -> None:
        """Nothing is open."""


NOW_S = 1_700_000_000.0
STALLED = Consumer("claw-lake", "claw.steps", 7, True, 21.0, "stalled", True)
OK = Consumer("claw-lake", "claw.rewards", 2, True, 1.0, "ok", False)
FOREIGN = Consumer("claw-admit.old.train", "claw.candidates", 3, False, 9.0, None, False)
LAKE = Process("lake", "running", True, False, 1, "http://lake", None, True)
GATEWAY = Process("gateway", "restarting", False, False, 2, "", "boom", True)
WORKER = Worker("w", "ready", "run/1.0", 2, 3.0, 2.0, 1, None)
PROBLEMS = [
    ("stalled: claw-lake does not read claw.steps", "kill -CONT 7"),
    ("gateway is restarting", "gateway is restarting: boom"),
]
OBSERVED = Observation(
    NOW_S, None, PROBLEMS, [STALLED, OK, FOREIGN], [LAKE, GATEWAY], [WORKER],
    Weights("run/3.0", NOW_S - 600), 4, Disk(1 << 30, 1 << 40), Spool(2048, 0, 0),
)  # fmt: skip
WITHOUT_KAFKA = Observation(at_s=0.0, kafka_error="no Kafka answers")


def inspected(settings: Settings) -> Inspected:
    """Return the application over `hostile_lake`, whose texts are indexed."""
    written = hostile_lake(settings)
    lake = LiveLake(settings, COPIES)
    lake.refresh()
    lake.texts.catch_up()
    return application(settings, written, lake)


def application(settings: Settings, written: ExportLake, lake: LiveLake) -> Inspected:
    """Return an application without marks over a lake. It finds policies in the lake only."""
    log, observed = InMemoryLog(), Observed(WITHOUT_KAFKA)
    QUERIES.append(SandboxedSql(settings))
    parts = Parts(
        lake, Live(lake), USERS.get, partial(chat_of, is_whole=True), lambda *_: None, "http://gateway",
        marks=MarkWriter(settings.kafka.topics.rewards, lambda: log, log.is_connected),
        rewards=(-10.0, 10.0),
        policies=RunPolicies(settings, cluster_of(settings), lake, lambda: False),
        sql=QUERIES[-1],
        operations=Watcher(observed),
        activity=Activity(lake), metrics=PageMetrics(),
    )  # fmt: skip
    client = TestClient(create_app(parts), headers={"accept": "text/html"}, follow_redirects=False)
    client.headers["authorization"] = f"Bearer {KEY}"
    return Inspected(settings, written, lake, parts, client, log, observed)
