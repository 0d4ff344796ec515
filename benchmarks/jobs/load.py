"""The input of `benchmarks.jobs`: synthetic trajectories, encoded once into files.

`benchmarks.jobs.feeder` puts a file on Kafka.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from benchmarks.jobs.feeder import HEAD
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.ids import new_ulid
from clawstream.schemas.records import Reward, SessionEvent, Step

RUN = "bench"
RULE = "exact_match"
GROUP_SIZE = 8
VOCABULARY = 151_936


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of trajectories. Lengths are tokens.

    The prompt of a turn is the earlier prompt and response, and `added` tokens more. together:
    Number of trajectories that run at once, a step of each in turn; a multiple of the group size.
    text: Requests and replies have four bytes of JSON a token instead of a few words.
    """

    turns: int
    first: int
    added: int
    response: int
    together: int = 64
    text: bool = False


STANDARD = Shape(turns=8, first=928, added=64, response=256)
"""2,048 prompt tokens a step on average."""
SMALL = Shape(turns=8, first=8, added=2, response=2)
LONG = Shape(turns=100, first=300, added=300, response=60, together=24)


@dataclass(frozen=True, slots=True)
class Load:
    """Trajectories number `first` to `first + trajectories`, in files."""

    steps_file: Path
    rewards_file: Path
    trajectories: int
    steps: int

    @property
    def groups(self) -> int:
        return self.trajectories // GROUP_SIZE


class Texts:
    """Random ids and log-probabilities: as of a model, some tokens are frequent, most are rare."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def ids(self, count: int) -> bytes:
        """Return packed token ids."""
        return np.exp(self._random.random(count) * math.log(VOCABULARY)).astype("<i4").tobytes()

    def logprobs(self, count: int) -> bytes:
        """Return packed log-probabilities."""
        return (-self._random.exponential(0.5, count)).astype("<f4").tobytes()


def name_of(kind: str, number: int) -> str:
    """Return an id as long and as random as a UUID."""
    return hashlib.blake2b(f"{kind}{number}".encode(), digest_size=16).hexdigest()


def events(shape: Shape, trajectories: int, first: int = 0) -> Iterator[Step | SessionEvent]:
    """Yield the records of `claw.steps` in order: for each trajectory opened, steps, completed.

    Every other trajectory has the right answer.
    """
    texts = Texts(first)
    for at in range(first, first + trajectories, shape.together):
        numbers = range(at, min(at + shape.together, first + trajectories))
        for number in numbers:
            yield _session(number, "opened", group_size=GROUP_SIZE, metadata_json=b'{"gold":"42"}')
        prompts = {number: texts.ids(shape.first) for number in numbers}
        for turn in range(shape.turns):
            for number in numbers:
                step = _step(shape, number, turn, prompts[number], texts)
                prompts[number] += (step.response_token_ids or b"") + texts.ids(shape.added)
                yield step
        for number in numbers:
            yield _session(number, "completed")


def _session(number: int, kind: Any, **more: Any) -> SessionEvent:
    return SessionEvent(
        event_id=new_ulid(),
        run_id=RUN,
        trajectory_key=name_of("t", number),
        kind=kind,
        group_id=name_of("g", number // GROUP_SIZE) if kind == "opened" else None,
        created_at=0,
        **more,
    )


def _step(shape: Shape, number: int, turn: int, prompt: bytes, texts: Texts) -> Step:
    key = name_of("t", number)
    call = f"{key}~{new_ulid()}"
    answer, question = "42" if number % 2 == 0 else "41", "What is six times seven?"
    if shape.text:
        answer, question = answer.rjust(4 * shape.response), question.ljust(len(prompt), ".")
    messages = [{"role": "user", "content": question}]
    request = {"model": "policy", "messages": messages, "temperature": 1.0}
    return Step(
        step_id=f"{call}.0",
        run_id=RUN,
        trajectory_key=key,
        call_id=call,
        choice_index=0,
        protocol="openai.chat",
        model="policy",
        status="ok",
        finish_reason="stop",
        streamed=False,
        request_json=orjson.dumps(request),
        response_json=orjson.dumps({"role": "assistant", "content": answer}),
        prompt_token_ids=prompt,
        response_token_ids=texts.ids(shape.response),
        response_logprobs=texts.logprobs(shape.response),
        version_first=f"{RUN}/0.0",
        version_last=f"{RUN}/0.0",
        worker_id="worker-0",
        gateway_id="gateway-0",
        received_at=turn,
        finished_at=turn,
    )


def rewards(trajectories: int, first: int = 0) -> Iterator[Reward]:
    """Yield the rewards that the reward job would write."""
    for number in range(first, first + trajectories):
        key = name_of("t", number)
        yield Reward(
            event_id=name_of("r", number),
            run_id=RUN,
            trajectory_key=key,
            trajectory_id=key,
            source="rule",
            name=RULE,
            function_version="1",
            value=float(number % 2 == 0),
            reward_revision=1,
            by="clawstream.reward",
            created_at=0,
        )


def write(directory: Path, shape: Shape, trajectories: int, first: int = 0) -> Load:
    """Encode trajectories into files of a directory."""
    name, codec = f"{shape.turns}-{shape.first}-{first}", Codec()
    files = (directory / f"{name}.steps", directory / f"{name}.rewards")
    records = (events(shape, trajectories, first), rewards(trajectories, first))
    for path, some in zip(files, records, strict=True):
        with path.open("wb") as out:
            for event in some:
                key, value = event.trajectory_key.encode(), codec.encode(event)
                out.write(HEAD.pack(isinstance(event, Reward), len(key), len(value)) + key + value)
    return Load(*files, trajectories, trajectories * shape.turns)
