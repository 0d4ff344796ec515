"""What is kept of whole records; and that a redactor that fails keeps the fact and nothing else."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from clawstream.gateway.errors import RedactionUnusable
from clawstream.gateway.redaction.records import R, without_contents
from clawstream.gateway.redaction.redactor import Redaction, Vocabularies, redaction_of
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.records import (
    Curation,
    Reward,
    SessionEvent,
    Step,
    Tag,
    TokenSpan,
    VersionSpan,
)
from clawstream.schemas.settings import Settings
from clawstream.schemas.tokens import pack_ids, pack_logprobs, unpack_ids, unpack_logprobs
from clawstream.stream_jobs.assemble.payload.trainability import trainability

SECRET = "joe@example.com"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One token a byte."""
    core = Tokenizer(
        models.BPE(
            vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))},
            merges=[],
        )
    )
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|end|>"])
    folder = tmp_path_factory.mktemp("tokenizer")
    core.save(str(folder / "tokenizer.json"))
    return folder


def ids_of(tokenizer: Path, text: str) -> list[int]:
    ids: list[int] = Tokenizer.from_file(str(tokenizer / "tokenizer.json")).encode(text).ids
    return ids


def text_of(tokenizer: Path, packed: bytes | None) -> str:
    core = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    text: str = core.decode(unpack_ids(packed or b""), skip_special_tokens=False)
    return text


def step(**more: Any) -> Step:
    known: dict[str, Any] = {
        "step_id": "t~01ARZ3NDEKTSV4RRFFQ69G5FAV.0", "run_id": "r", "trajectory_key": "t",
        "call_id": "t~01ARZ3NDEKTSV4RRFFQ69G5FAV", "choice_index": 0,
        "protocol": "openai_chat", "model": "policy", "status": "ok", "streamed": False,
        "gateway_id": "g", "received_at": 1, "finished_at": 2,
        "request_json": json.dumps({"messages": [{"role": "user",
        "content": f"mail {SECRET}"}]}).encode(),
        "response_json": json.dumps({"role": "assistant", "content": f"to {SECRET}."}).encode(),
        "user_agent": f"agent/1.0 (mailto:{SECRET})",
        "tags": (Tag(name="agent", evidence=f"user {SECRET}"),),
    }  # fmt: skip
    return Step(**known | more)


def with_tokens(tokenizer: Path, **more: Any) -> Step:
    response = ids_of(tokenizer, f"to {SECRET}.<|end|>")
    return step(
        prompt_token_ids=pack_ids(ids_of(tokenizer, f"mail {SECRET}<|end|>")),
        response_token_ids=pack_ids(response),
        response_logprobs=pack_logprobs([-0.5] * len(response)),
        versions=(VersionSpan(version="r/1.0", start=0, end=len(response)),), **more,
    )  # fmt: skip


EVENT = SessionEvent(
    event_id="e", run_id="r", trajectory_key="t", kind="opened",
    metadata_json=json.dumps({"user": SECRET, "n": 1}).encode(), reason=f"for {SECRET}",
    created_at=1
)  # fmt: skip
REWARD = Reward(
    event_id="e", run_id="r", trajectory_key="t", source="rule", name="n", function_version="1",
    value=1.0, reason=f"{SECRET} said so", reward_revision=0,
    by="judge-1", detail_json=json.dumps({"password": "hunter2"}).encode(), created_at=1,
)  # fmt: skip
CURATION = Curation(
    event_id="e",
    run_id="r",
    trajectory_key="t",
    note=f"by {SECRET}",
    tags=("good", SECRET),
    by="inspector",
    created_at=1,
)


class Failures:
    """Counts."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


def made(failed: Callable[[], None] | None = None, **said: Any) -> Redaction:
    redaction = redaction_of(
        Settings.model_validate({"gateway": {"redaction": {"enabled": True} | said}}),
        b"secret",
        failed or Failures(),
    )
    assert redaction is not None
    return redaction


def redacted(record: R, **said: Any) -> R:
    return asyncio.run(made(**said).redacted(record))


def everything(record: Any) -> Iterator[bytes]:
    """All that is written in a record, as it goes to Kafka."""
    yield Codec().encode(record)


def test_it_is_off_by_default() -> None:
    assert redaction_of(Settings(), b"secret", Failures()) is None


@pytest.mark.parametrize(
    "record", [step(), EVENT, REWARD, CURATION], ids=lambda r: type(r).__name__
)
def test_nothing_of_a_secret_is_kept(record: Any) -> None:
    new = redacted(record)
    for raw in everything(new):
        assert SECRET.encode() not in raw and b"hunter2" not in raw and b"[REDACTED:" in raw
    same = {
        "step_id",
        "event_id",
        "run_id",
        "trajectory_key",
        "call_id",
        "by",
        "value",
        "model",
        "status",
        "created_at",
    }
    assert all(
        getattr(new, f.name) == getattr(record, f.name) for f in fields(record) if f.name in same
    )
    assert redacted(new) == new


def test_what_has_no_secret_is_the_same_object() -> None:
    clean = step(request_json=b'{"a": 1}', response_json=b"null", user_agent="agent/1.0", tags=())
    assert redacted(clean) is clean


def test_a_steps_tokens_say_what_its_bodies_say(tokenizer: Path) -> None:
    new = redacted(with_tokens(tokenizer), tokenizers={"*": tokenizer})
    instead = json.loads(new.response_json)["content"]
    assert text_of(tokenizer, new.response_token_ids) == f"{instead}<|end|>" and instead.startswith(
        "to [REDACTED:EMAIL:"
    )
    assert text_of(tokenizer, new.prompt_token_ids) == f"mail {instead[3:-1]}<|end|>"
    first, last = 3, len(instead) - 1
    assert new.redacted_response == (TokenSpan(start=first, end=last),) and new.redacted_prompt == (
        TokenSpan(start=5, end=last + 2),
    )
    assert [math.isnan(p) for p in unpack_logprobs(new.response_logprobs or b"")] == [
        first <= i < last for i in range(len(instead) + 1)
    ]
    assert (
        new.versions == (VersionSpan(version="r/1.0", start=0, end=len(instead) + 1),)
        and new.tokens_absent_reason is None
    )
    assert trainability(new).reason is None and trainability(new).versions == new.versions


def test_a_tokenizer_is_found_by_model_then_by_the_gateways_own(tokenizer: Path) -> None:
    ours = with_tokens(tokenizer)
    assert redacted(ours, tokenizers={"policy": tokenizer}).redacted_response
    other = redacted(ours, tokenizers={"another": tokenizer})
    assert (
        other.response_token_ids is None
        and other.tokens_absent_reason == "redaction is on and has no tokenizer for model policy"
    )
    settings = Settings.model_validate(
        {"gateway": {"tokenizer_path": tokenizer, "redaction": {"enabled": True}}}
    )
    redaction = redaction_of(settings, b"secret", Failures())
    assert redaction is not None and asyncio.run(redaction.redacted(ours)).redacted_response


@pytest.mark.parametrize(
    ("ids", "said", "why"),
    [([1, 2], "", "has no tokenizer for model policy"),
    ([1, 99_999], None, "cannot read the tokens: token id 99999"),
    ([1], "{", "cannot read the tokens: ")],
)  # fmt: skip
def test_ids_that_cannot_be_read_are_never_kept(
    tokenizer: Path, tmp_path: Path, ids: list[int], said: str | None, why: str
) -> None:
    paths = {"*": tokenizer}
    if said is not None:
        (tmp_path / "tokenizer.json").write_text(said)
        paths = {"*": tmp_path} if said else {}
    old = step(
        prompt_token_ids=pack_ids(ids),
        response_token_ids=pack_ids(ids),
        response_logprobs=pack_logprobs([0.0] * len(ids)),
    )
    redaction = made(tokenizers=paths)
    for _ in range(2):
        new = asyncio.run(redaction.redacted(old))
        assert (
            new.prompt_token_ids,
            new.response_token_ids,
            new.response_logprobs,
            new.versions,
        ) == (
            None,
            None,
            None,
            (),
        )
        assert why in (new.tokens_absent_reason or "")
        assert SECRET not in str(new) and b"REDACTED" in new.request_json


class Broken:
    """A redactor that fails, with the secret in its message."""

    def redact(self, record: R) -> R:
        raise RuntimeError(f"no idea what {SECRET} is")


@pytest.mark.parametrize(
    "record",
    [step(), EVENT, REWARD, CURATION, replace(EVENT, reason=None), replace(REWARD, reason=None)],
    ids=lambda r: type(r).__name__,
)
def test_a_redactor_that_fails_keeps_the_fact_and_nothing_else(record: Any) -> None:
    failures = Failures()
    new = asyncio.run(Redaction(Broken(), Vocabularies({}), failures).redacted(record))
    assert failures.count == 1 and new == without_contents(record, "RuntimeError")
    for raw in everything(new):
        assert SECRET.encode() not in raw and b"hunter2" not in raw
    if isinstance(record, Step):
        assert (new.request_json, new.response_json, new.tokens_absent_reason) == (
            b"null",
            b"null",
            "redaction failed: RuntimeError",
        )
        assert (new.step_id, new.status, new.finished_at, new.model) == (
            record.step_id,
            record.status,
            record.finished_at,
            record.model,
        )
    else:
        assert (new.event_id, new.created_at) == (record.event_id, record.created_at)


def test_a_rule_of_ones_own_that_fails_keeps_the_fact(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "rules_of_my_own.py").write_text(
        "def breaks(text):\n    raise KeyError(text)\n"
        "def find(text):\n    return [(0, 3)] if text.startswith('to ') else []\nnumber = 3\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    failures = Failures()
    new = asyncio.run(made(failures, rules=("email", "rules_of_my_own:breaks")).redacted(step()))
    assert (
        failures.count == 1
        and new.request_json == b"null"
        and "KeyError" in (new.tokens_absent_reason or "")
    )
    assert (
        json.loads(redacted(step(), rules=("rules_of_my_own:find",), style="plain").response_json)[
            "content"
        ]
        == f"[REDACTED:FIND]{SECRET}."
    )
    for name, why in [
        ("rules_of_my_own:number", "not callable"),
        ("rules_of_my_own:none", "has no none"),
        ("nowhere_at_all:f", "No module named"),
        ("e-mail", "use private_key"),
    ]:
        with pytest.raises(RedactionUnusable, match=why):
            made(rules=(name,))


def test_a_tokenizer_that_is_not_there_is_told_at_start(tmp_path: Path) -> None:
    with pytest.raises(RedactionUnusable, match="for model m"):
        made(tokenizers={"m": tmp_path / "none"})


def test_the_default_rules_are_all_but_ipv4_and_in_any_order_the_same() -> None:
    names = Settings().gateway.redaction.rules
    said = step(request_json=b'{"a": "token=ghp_0123456789abcdefghijABCDEFGHIJ012345 8.8.8.8"}')
    assert (
        redacted(said, rules=names[::-1]) == redacted(said)
        and b"8.8.8.8" in redacted(said).request_json
    )
    assert b"IPV4" in redacted(said, rules=("ipv4",)).request_json


def test_all_gateways_of_an_installation_give_the_same_and_others_do_not() -> None:
    settings = Settings.model_validate({"gateway": {"redaction": {"enabled": True}}})
    seen = []
    for secret in (b"one", b"one", b"two"):
        redaction = redaction_of(settings, secret, Failures())
        assert redaction is not None
        seen.append(asyncio.run(redaction.redacted(step())))
    assert seen[0] == seen[1] != seen[2]


class Where:
    """A redactor that says in which thread it ran."""

    def __init__(self) -> None:
        self.threads: list[int] = []

    def redact(self, record: R) -> R:
        self.threads.append(threading.get_ident())
        return record


def test_large_records_and_the_first_tokens_do_not_hold_up_the_loop(tokenizer: Path) -> None:
    where = Where()
    redaction = Redaction(where, Vocabularies({"*": tokenizer}), Failures())

    async def all_of() -> None:
        await redaction.redacted(step())
        await redaction.redacted(replace(EVENT, metadata_json=b"1"))
        await redaction.redacted(step(request_json=b" " * (17 << 10) + b"{}"))
        await redaction.redacted(with_tokens(tokenizer))
        await redaction.redacted(replace(REWARD, detail_json=b" " * (17 << 10) + b"{}"))

    asyncio.run(all_of())
    here = threading.get_ident()
    assert [thread == here for thread in where.threads] == [True, True, False, False, False]
