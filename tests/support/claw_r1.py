"""Claw-R1's own API in tests: the steps that its agents submit, and the request."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

from support.gateway import GatewayFixture
from support.scripted.script import ScriptedChoice

from clawstream.schemas.codec.single_object import Codec

HI = ScriptedChoice([7, 8, 9], ["Hel", "lo", ""], [-0.5, -0.25, -0.125], finish_reason="length")
CODEC = Codec()
RunScenario = Callable[..., None]
BIG = 10**30


def step(**more: Any) -> dict[str, Any]:
    """Return a step with every field, as Claw-R1's flows post it."""
    return {
        "prompt_ids": [1, 2, 3], "response_ids": [7, 8, 9], "reward": None,
        "rollout_log_probs": [-0.5, -0.25, -0.125], "trajectory_uid": "t1", "prompt_uid": "g1",
        "step_index": 0, "policy_version": 0, "is_last": False, "metadata": None,
    } | more  # fmt: skip


async def post(w: GatewayFixture, path: str, body: Any, **headers: str) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    told = {"content-type": "application/json"} | {
        k.replace("_", "-"): v for k, v in headers.items()
    }
    async with w.http.post(w.url + path, data=io.BytesIO(data), headers=told) as r:
        return r.status, await r.json()
