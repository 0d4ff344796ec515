"""Web pages of other sites cannot use an open gateway by way of a developer's browser."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.gateway import GatewayFixture, run_gateway
from support.scripted.script import Script, ScriptedChoice

from clawstream.gateway.asgi.error_replies import http_error_of
from clawstream.gateway.auth.authenticator import Authenticator
from clawstream.gateway.errors import Forbidden
from clawstream.gateway.metrics import Metrics
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.settings import Settings

ASK: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
CALL = "/t/g/v1/chat/completions"
FOREIGN = (
    *("http://evil.example", "http://evil.example:8100", "http://127.0.0.1.evil.com"),
    *("http://evillocalhost", "HTTP://evil.example", "http://[", "evil.example", "null"),
)
OURS = (
    *("http://localhost:3000", "http://127.0.0.1:8100", "http://[::1]:5173"),
    "http://tauri.localhost",
)
APPS = ("vscode-webview://1a2b", "app://obsidian.md", "file://", "chrome-extension://abcdef")
NAMED = "https://app.example"


async def status(made: GatewayFixture, path: str, body: Any, origin: str | None) -> int:
    """Return the status of what a page of an origin sends. A rebound name is its own Host."""
    headers = {"content-type": "text/plain"}
    if origin is not None:
        headers |= {"origin": origin}
        if origin not in APPS:
            headers |= {"host": origin.rpartition("/")[2]}
    async with made.http.post(made.url + path, data=json.dumps(body), headers=headers) as reply:
        return int(reply.status)


def test_an_open_gateway_answers_only_pages_of_this_machine_and_named_ones(
    tmp_path: Path,
) -> None:
    """A browser sends text/plain to any site without asking it first."""

    async def scenario(made: GatewayFixture) -> None:
        for origin in FOREIGN:
            assert await status(made, CALL, ASK, origin) == 403, origin
            assert await status(made, "/t/g/complete_trajectory", {"reward": 1}, origin) == 403
        assert made.steps() == []
        for other in (*OURS, *APPS, NAMED, None):
            assert await status(made, CALL, ASK, other) == 200, other

    script = Script([ScriptedChoice([7], ["x"], [-0.5])])
    run_gateway(tmp_path, Codec(), scenario, script, cors_origins=[NAMED])


def test_an_open_gateway_for_all_pages_answers_them(tmp_path: Path) -> None:
    async def scenario(made: GatewayFixture) -> None:
        assert await status(made, CALL, ASK, FOREIGN[0]) == 200

    script = Script([ScriptedChoice([7], ["x"], [-0.5])])
    run_gateway(tmp_path, Codec(), scenario, script, cors_origins=["*"])


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        *((host, 403) for host in ("evil.example", "evil.example:8100", "127.0.0.1.evil.com", "[")),
        *((host, 200) for host in ("localhost:8100", "127.0.0.1", "[::1]:8100", "10.0.0.7:80", "")),
        *(
            (host, 200)
            for host in ("gateway", "host.docker.internal", "mac.local:8100", "a.localhost")
        ),
        *((host, 200) for host in ("llm.example", "LLM.example.:443", "app.example")),
    ],
)
def test_a_name_that_a_site_may_own_does_not_lead_to_an_open_gateway(
    tmp_path: Path, host: str, expected: int
) -> None:
    """A page of a site whose name leads to 127.0.0.1 is of the same origin: it sends none."""
    settings = Settings.model_validate(
        {
            "data_dir": tmp_path,
            "gateway": {"public_url": "https://llm.example/x", "cors_origins": [NAMED]},
        }
    )
    authenticator = Authenticator(settings, Metrics())
    try:
        authenticator.authenticate({"host": host}, "agent")
        status = 200
    except Forbidden as error:
        status = http_error_of(error).status
    assert status == expected
