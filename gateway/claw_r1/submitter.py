"""Serve POST /submit_steps.

The steps, their rewards, and the openings and ends of their trajectories are durable before the
reply.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from clawstream.gateway.api.bodies import Complete, GiveReward, Register, read_as
from clawstream.gateway.api.recorder import Recorder
from clawstream.gateway.auth.authenticator import Principal
from clawstream.gateway.claw_r1.reward import TextOf
from clawstream.gateway.claw_r1.steps import (
    AttributedStep,
    RequestContext,
    StepPayload,
    Submission,
    step_of,
)
from clawstream.gateway.durability.record_writer import Event
from clawstream.gateway.errors import BadRequest, Unprocessable
from clawstream.gateway.proxy.services import Services
from clawstream.schemas.records import Channel, Step

THREAD_BYTES = 1 << 14
"""Submissions above this size are read in a thread.

1 MB of ids takes 20 ms to read, and so do 16 KB of tiny steps.
"""


class Submitter:
    """Serve POST /submit_steps."""

    def __init__(self, services: Services, text_of: TextOf | None) -> None:
        self._services, self._text_of, self._recorder = services, text_of, Recorder(services)
        self._thread = ThreadPoolExecutor(1, "submit-steps")

    async def submit(
        self, caller: Principal, headers: Mapping[str, str], body: bytes, channel: Channel | None
    ) -> int:
        """Record the steps, and return their number.

        Raises:
            GatewayError: Some steps may be recorded; submitting all again is harmless.
        """
        if len(body) < THREAD_BYTES:
            steps, events = self._read(caller, headers, body, channel)
        else:
            read: Callable[..., tuple[int, list[Event]]] = self._read
            loop = asyncio.get_running_loop()
            steps, events = await loop.run_in_executor(
                self._thread, read, caller, headers, body, channel
            )
        if events:
            await self._recorder.record(events)
        self._services.metrics.steps_recorded.labels("ok").inc(steps)
        return steps

    def close(self) -> None:
        """Stop the thread without waiting."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _read(
        self, caller: Principal, headers: Mapping[str, str], body: bytes, channel: Channel | None
    ) -> tuple[int, list[Event]]:
        services = self._services
        context = RequestContext(
            services.settings.gateway.gateway_id, services.clock.micros(), headers.get("user-agent")
        )
        attributed = [
            self._attribute(caller, headers, index, payload, channel)
            for index, payload in enumerate(read_as(Submission, body).steps)
        ]
        # In the order in which assemble shall find them on the log.
        attributed.sort(key=lambda step: step.payload.step_index)
        steps = [(a, step_of(a, context, self._text(a.payload))) for a in attributed]
        return len(steps), self._events(caller, steps)

    def _attribute(
        self,
        caller: Principal,
        headers: Mapping[str, str],
        index: int,
        payload: StepPayload,
        channel: Channel | None,
    ) -> AttributedStep:
        """Resolve the trajectory of a step; an error names the step's own field."""
        key, group = payload.trajectory_uid or None, payload.prompt_uid or None
        try:
            ref = self._services.trajectories.resolve(caller, headers, key, group, channel=channel)
        except BadRequest as error:
            if error.param == "run_id":
                raise
            name = "prompt_uid" if error.param == "group_id" else "trajectory_uid"
            field = f"steps.{index}.{name}"
            raise Unprocessable(f"{field}: {error.message}", field) from error
        return AttributedStep(index, payload, ref)

    def _text(self, payload: StepPayload) -> str | None:
        return self._text_of(payload.response_ids) if self._text_of is not None else None

    def _events(
        self, caller: Principal, steps: Sequence[tuple[AttributedStep, Step]]
    ) -> list[Event]:
        """Return the events in log order: openings, steps, ends; rewards have their own log.

        The reward of a last step is the trajectory's, as in Claw-R1's own complete_trajectory.
        """
        recorder, authenticator = self._recorder, self._services.authenticator
        opened: dict[bytes, Event] = {}
        rewards: list[Event] = []
        ended: dict[str, Event] = {}
        for attributed, step in steps:
            payload, ref = attributed.payload, attributed.ref
            field = f"steps.{attributed.index}.reward"
            if payload.metadata and ref.kafka_key not in opened:
                opened[ref.kafka_key] = recorder.opened(ref, Register(metadata=payload.metadata))
            if payload.is_last:
                if payload.reward is not None:
                    authenticator.require_completion_reward(caller)
                end = Complete(reward=payload.reward)
                *its_reward, ending = recorder.ended(ref, end, field, caller.name)
                rewards += its_reward
                ended[ending.event_id] = ending
            elif payload.reward is not None:
                authenticator.require(caller, "reward")
                given = GiveReward(
                    source="env",
                    name="submit_steps",
                    function_version="1",
                    step_id=step.step_id,
                    value=payload.reward,
                )
                rewards.append(recorder.reward(ref, given, field, caller.name))
        return [*opened.values(), *(step for _, step in steps), *rewards, *ended.values()]
