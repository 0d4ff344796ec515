"""Serve POST /compute_reward: the score that one reward function gives a response. Records nothing.

The function is one of the reward job's (`clawstream.rewards.registry`), so it gets a closed
trajectory: one step, with the dataset's fields as metadata. A user's function runs in a child
process with a time-out, and a gateway thread waits for it: a function that is slow, hangs or
crashes delays neither calls nor the spool.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import orjson
from pydantic import BaseModel, ConfigDict, Field

from clawstream.gateway.api.bodies import json_of
from clawstream.gateway.claw_r1.bodies import TokenIds
from clawstream.gateway.errors import NotConfigured, Unprocessable
from clawstream.rewards.registry import Rule, rule_of
from clawstream.runtime.functions.pool import FunctionPool
from clawstream.schemas.numbers.values import number_of
from clawstream.schemas.records import Segment, Trajectory, TrajectoryStep
from clawstream.schemas.records.rewards import out_of_bounds
from clawstream.schemas.rule_spec import reason_text
from clawstream.schemas.settings import Settings
from clawstream.schemas.tokens import pack_ids

THREADS = 4
STEP_ID = "compute-reward~00000000000000000000000000.0"
TextOf = Callable[[Sequence[int]], str]


class ComputeReward(BaseModel):
    """Body of POST /compute_reward.

    num_turns, extra_fields and dataset_fields are the function's metadata.
    """

    model_config = ConfigDict(frozen=True)

    prompt_ids: TokenIds
    response_ids: TokenIds
    multi_modal_data: dict[str, Any] | None = None
    num_turns: Annotated[int, Field(ge=0, strict=True)] = 2
    extra_fields: dict[str, Any] = {}
    dataset_fields: dict[str, Any] = {}


def trajectory_of(body: ComputeReward, run_id: str, text: str) -> Trajectory:
    """Return the trajectory for the function. text: of the response. Raises Unprocessable."""
    prompt, response = pack_ids(body.prompt_ids), pack_ids(body.response_ids)
    metadata = {
        **body.dataset_fields,
        "num_turns": body.num_turns,
        "extra_fields": body.extra_fields,
    }
    step = TrajectoryStep(
        step_id=STEP_ID, index=0, segment=1, status="ok", drift="root",
        prompt_tokens=len(body.prompt_ids), response_tokens=len(body.response_ids),
        response_json=orjson.dumps({"role": "assistant", "content": text}),
        trainable=False, untrainable_reason="computed on request", offset=0,
    )  # fmt: skip
    return Trajectory(
        run_id=run_id, trajectory_key="compute-reward", trajectory_id="compute-reward",
        group_id="compute-reward", channel="train", outcome="completed", opened_at=0, closed_at=0,
        metadata_json=json_of(metadata, "dataset_fields"), part=0, parts=1, steps=(step,),
        segments=(Segment(token_ids=prompt), Segment(parent=0, step_index=0, token_ids=response)),
    )  # fmt: skip


def score_of(rule: Rule, trajectory: Trajectory) -> float:
    """Return the score. Raises Unprocessable with the reason when the function gives none."""
    try:
        result = rule.function(trajectory)
    except MemoryError:
        raise
    except Exception as error:  # a user's function: the reply reports its exception
        raise Unprocessable(f"{rule}: {reason_text(error)}", "dataset_fields") from error
    score = result.get(STEP_ID) if isinstance(result, Mapping) else result
    if isinstance(score, list | tuple):  # with details
        score = score[0]
    try:
        number = number_of(score)
    except TypeError as error:
        raise Unprocessable(f"{rule}: {score!r:.80} is no number", "dataset_fields") from error
    if (why := out_of_bounds(number)) is not None:
        raise Unprocessable(f"{rule}: {why}", "dataset_fields")
    return float(number)


class RewardFunction:
    """The function of `gateway.compute_reward`."""

    def __init__(self, settings: Settings, text_of: TextOf | None) -> None:
        """Load the function.

        Args:
            settings: The settings.
            text_of: Decodes token ids; None when no tokenizer is configured.

        Raises:
            SettingsError: The function does not exist.
        """
        self._pool, self._text_of = FunctionPool(settings.functions), text_of
        spec = settings.gateway.compute_reward
        try:
            self._rule = (
                rule_of(spec, "gateway.compute_reward", self._pool.find, settings.reward_models)
                if spec is not None
                else None
            )
        except BaseException:  # interrupted too: else the child processes would stay
            self._pool.stop()
            raise
        self._threads = ThreadPoolExecutor(THREADS, "compute-reward")

    async def score(self, body: ComputeReward, run_id: str) -> dict[str, Any]:
        """Return the reply.

        Raises:
            NotConfigured: No function or no tokenizer is configured.
            Unprocessable: The function gave no reward; the message gives the reason.
        """
        if self._rule is None:
            raise NotConfigured(
                "no reward function: set gateway.compute_reward=name@version, see docs/claw-r1.md"
            )
        if self._text_of is None:
            raise NotConfigured(
                "no tokenizer to read response_ids with: set gateway.tokenizer_path"
            )
        rule, text_of = self._rule, self._text_of

        def work() -> float:
            return score_of(rule, trajectory_of(body, run_id, text_of(body.response_ids)))

        score = await asyncio.get_running_loop().run_in_executor(self._threads, work)
        return {
            "reward_score": score,
            "reward_extra_info": {"function": rule.name, "function_version": rule.version},
        }

    def close(self) -> None:
        """Stop its threads and child processes without waiting for a running function."""
        self._pool.stop()
        self._threads.shutdown(wait=False, cancel_futures=True)
