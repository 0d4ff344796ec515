"""White-box agents of Claw-R1 on the runner, against a real gateway with a scripted engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.gateway import GatewayFixture, run_gateway
from support.scripted.script import Script, ScriptedChoice

from clawstream.agent_flow.claw_r1 import AgentFlowBase, AgentStep, claw_r1_flow, register
from clawstream.agent_flow.errors import FlowError
from clawstream.agent_flow.flow import Flow, Limits
from clawstream.agent_flow.gateway.client import Gateway
from clawstream.agent_flow.play.progress import Progress
from clawstream.agent_flow.play.runner import Options, Runner
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.records import Reward, SessionEvent, Step
from clawstream.schemas.tokens import unpack_ids

CODEC = Codec()
TASKS = [{"id": "a", "prompt": [{"role": "user", "content": "hi"}]}]


class LengthTokenizer:
    """Renders each message as the length of its text."""

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **_: object) -> list[int]:
        return [len(message["content"]) for message in messages]


def play(tmp_path: Path, flow: Flow, n: int = 1) -> tuple[Progress, list[Any]]:
    progress, records = Progress(), []
    options = Options(Limits(group_size=n, attempts=1), "default", "val")

    async def scenario(fixture: GatewayFixture) -> None:
        async with Gateway(fixture.url, None, patience_s=5) as gateway:
            await Runner(flow, gateway, options, progress).play(lambda: TASKS)
        records.extend(fixture.records())

    script = Script([ScriptedChoice([7, 8], ["Hel", "lo"], [-0.5, -0.25])], prompt_ids=[2])
    run_gateway(tmp_path, CODEC, scenario, script)
    return progress, records


def test_default_agent_submits_its_step(tmp_path: Path) -> None:
    progress, records = play(
        tmp_path, claw_r1_flow(LengthTokenizer(), sampling_params={"max_tokens": 4})
    )
    assert progress.summary()["rollouts"] == {"completed": 1}, progress.reasons
    (step,) = (r for r in records if isinstance(r, Step))
    assert (unpack_ids(step.prompt_token_ids), unpack_ids(step.response_token_ids)) == ([2], [7, 8])
    assert not [r for r in records if isinstance(r, Reward)]


def test_own_agent_gives_the_reward(tmp_path: Path) -> None:
    @register("two_steps")
    class TwoSteps(AgentFlowBase):
        async def run(self, sampling_params: dict[str, Any], **dataset_fields: Any) -> int:
            prompt = self.apply_chat_template(dataset_fields["raw_prompt"])
            steps = []
            for index in range(2):
                reply = await self.gateway_generate(prompt, {**sampling_params, "max_tokens": 4})
                steps.append(
                    AgentStep(
                        prompt_ids=prompt,
                        response_ids=reply.token_ids,
                        rollout_log_probs=reply.log_probs,
                        versions=reply.versions,
                        step_index=index,
                        metadata={"turn": index},
                    )
                )
                prompt = [*prompt, *reply.token_ids]
            self.reward = 0.5
            return await self.gateway_submit_steps(steps)

    progress, records = play(tmp_path, claw_r1_flow(LengthTokenizer(), "two_steps"))
    assert progress.summary()["rollouts"] == {"completed": 1}, progress.reasons
    steps = [r for r in records if isinstance(r, Step)]
    assert [unpack_ids(s.prompt_token_ids) for s in steps] == [[2], [2, 7, 8]]
    assert [r.value for r in records if isinstance(r, Reward)] == [0.5]


def test_repeats_are_one_group_of_distinct_trajectories(tmp_path: Path) -> None:
    agent = claw_r1_flow(LengthTokenizer(), sampling_params={"max_tokens": 4})
    progress, records = play(tmp_path, agent, n=3)
    assert progress.summary()["rollouts"] == {"completed": 3}, progress.reasons
    opened = [r for r in records if isinstance(r, SessionEvent) and r.kind == "opened"]
    assert [r.group_size for r in opened] == [3, 3, 3] and len({r.group_id for r in opened}) == 1
    keys = {r.trajectory_key for r in opened}
    steps = [r for r in records if isinstance(r, Step)]
    assert len(keys) == len(steps) == 3 and {s.trajectory_key for s in steps} == keys
    assert {s.group_id for s in steps} == {opened[0].group_id}


def test_unknown_agent_is_refused() -> None:
    with pytest.raises(FlowError, match="single_step_single_turn_agent"):
        claw_r1_flow(LengthTokenizer(), "unknown")
