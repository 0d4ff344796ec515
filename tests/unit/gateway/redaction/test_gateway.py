"""Through a whole gateway: engine and client see everything, log and spool do not."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from support.gateway import GatewayFixture, run_gateway
from support.scripted.script import Script, ScriptedChoice
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.tokens import unpack_ids, unpack_logprobs

CODEC = Codec()
SECRET = "joe@example.com"
TEXT = f"ask {SECRET} then"
ON = {"enabled": True}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One token a byte."""
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab=letters, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    folder = tmp_path_factory.mktemp("tokenizer")
    core.save(str(folder / "tokenizer.json"))
    return folder


def script(tokenizer: Path) -> Script:
    core = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    ids = core.encode(TEXT).ids
    return Script(
        [ScriptedChoice(ids, list(TEXT), [-0.5] * len(ids))],
        prompt_ids=core.encode(f"to {SECRET}\n").ids,
    )


def everything(trial: GatewayFixture) -> bytes:
    """All bytes that were kept."""
    files = [path.read_bytes() for path in trial.settings.spool_dir.rglob("*") if path.is_file()]
    return b"\n".join([*(m.value for m in trial.producer.messages), *files])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("spooled", [False, True])
def test_only_what_is_kept_is_redacted(
    tmp_path: Path, tokenizer: Path, stream: bool, spooled: bool
) -> None:
    async def scenario(trial: GatewayFixture) -> None:
        trial.producer.acknowledges = not spooled
        body = {
            "model": "policy",
            "stream": stream,
            "messages": [{"role": "user", "content": f"I am {SECRET}"}],
        }
        reply = await trial.http.post(trial.url + "/t1/g1/v1/chat/completions", json=body)
        said = await reply.text()
        assert reply.status == 200 and (SECRET in said or stream)
        assert trial.engine.requests[-1]["messages"] == body["messages"]
        (step,) = [
            r
            for r in (trial.spooled() if spooled else trial.records())
            if hasattr(r, "request_json")
        ]
        assert SECRET.encode() not in everything(trial)
        shown = json.loads(step.response_json)["content"]
        core = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
        assert core.decode(unpack_ids(step.response_token_ids)) == shown and shown.startswith(
            "ask [REDACTED:EMAIL:"
        )
        assert (
            core.decode(unpack_ids(step.prompt_token_ids)) == shown[:-5].replace("ask", "to") + "\n"
        )
        trial.producer.acknowledges = True
        logprobs = unpack_logprobs(step.response_logprobs)
        (span,) = step.redacted_response
        assert [math.isnan(p) for p in logprobs] == [
            span.start <= i < span.end for i in range(len(logprobs))
        ]

    run_gateway(
        tmp_path, CODEC, scenario, script(tokenizer), tokenizer_path=tokenizer, redaction=ON
    )


def test_sessions_and_rewards_are_redacted_too(tmp_path: Path, tokenizer: Path) -> None:
    async def scenario(trial: GatewayFixture) -> None:
        opened = {"trajectory_key": "t1", "metadata": {"user": SECRET}}
        assert (await trial.http.post(trial.url + "/sessions", json=opened)).status == 201
        reward = {"trajectory_id": "t1", "source": "human", "name": "n", "function_version": "1",
        "value": 1.0, "reward_revision": 0,
                  "reason": f"{SECRET} liked it", "detail": {"password": "hunter2"}}  # fmt: skip
        assert (await trial.http.post(trial.url + "/rewards", json=reward)).status == 201
        kept = everything(trial)
        assert (
            SECRET.encode() not in kept
            and b"hunter2" not in kept
            and kept.count(b"[REDACTED:EMAIL:") == 2
        )

    run_gateway(tmp_path, CODEC, scenario, script(tokenizer), redaction=ON)


def test_a_rule_that_fails_costs_the_contents_but_not_the_step(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rules_that_break.py").write_text("def find(text):\n    raise RuntimeError(text)\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    async def scenario(trial: GatewayFixture) -> None:
        body = {"model": "policy", "messages": [{"role": "user", "content": f"I am {SECRET}"}]}
        reply = await trial.http.post(trial.url + "/t1/g1/v1/chat/completions", json=body)
        assert reply.status == 200 and SECRET in await reply.text()
        (step,) = trial.steps()
        assert step.step_id == reply.headers["x-clawstream-step"] and step.status == "ok"
        assert step.tokens_absent_reason == "redaction failed: RuntimeError"
        assert SECRET.encode() not in everything(trial)
        assert await trial.metric("clawstream_gateway_redaction_failed_total") == 1

    run_gateway(
        tmp_path,
        CODEC,
        scenario,
        script(tokenizer),
        redaction=ON | {"rules": ("rules_that_break:find",)},
    )
