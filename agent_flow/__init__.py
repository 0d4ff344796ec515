"""Agent flows: write a task and a reward, get rollouts that are recorded, grouped and trained.

    from clawstream.agent_flow import flow
    from clawstream.agent_flow.rewards import last_number

    @flow(group_size=8)
    async def calculator(task, rollout):
        reply = await rollout.chat(task["question"], tools=[add], max_turns=6)
        return last_number(reply.text, task["answer"])

    @calculator.tasks
    def tasks():
        for i in range(1000):
            yield {"id": f"sum-{i}", "question": f"What is {i} + {i}?", "answer": 2 * i}

`clawstream flow run FILE:calculator` plays it against a gateway.
"""

from clawstream.agent_flow.chat.loop import Reply
from clawstream.agent_flow.environments.environment import Split
from clawstream.agent_flow.errors import FlowError
from clawstream.agent_flow.flow import Flow, flow
from clawstream.agent_flow.outcome import Reward
from clawstream.agent_flow.rollout import Rollout
from clawstream.agent_flow.tasks import Task

__all__ = ["Flow", "FlowError", "Reply", "Reward", "Rollout", "Split", "Task", "flow"]
