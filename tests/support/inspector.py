"""The inspector over a small lake: the application without a server or a broker."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from fastapi.testclient import TestClient
from support.export_lake import ExportLake, export_lake, turn

from clawstream.export.chat import chat_of
from clawstream.query.live_lake import Copy, LiveLake
from inspector.live.feed import Live
from inspector.queries.lake import COPIES
from inspector.web.app import Parts, create_app
from schemas.settings import Settings

KEY = "claw-test"
HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>"


@dataclass
class Inspected:
    """An application, its lake, and a client that has a key."""

    written: ExportLake
    lake: LiveLake
    parts: Parts
    client: TestClient


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


def inspected(settings: Settings) -> Inspected:
    """Return the application over `hostile_lake`."""
    written = hostile_lake(settings)
    lake = LiveLake(settings, {name: Copy(*copy) for name, copy in COPIES.items()})
    parts = Parts(lake, Live(lake), KEY.__eq__, chat_of, lambda *_: None, "http://gateway")
    client = TestClient(create_app(parts), headers={"accept": "text/html"}, follow_redirects=False)
    client.headers["authorization"] = f"Bearer {KEY}"
    return Inspected(written, lake, parts, client)
