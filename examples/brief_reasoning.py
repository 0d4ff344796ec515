"""A task of reasoning-gym with a second reward: for a reply of few words.

    clawstream flow run env=examples/brief_reasoning.py:leg_counting size=500 \
        env_config='{"max_animals": 3}'

Any data set of reasoning-gym instead of leg_counting. `--eval` plays other tasks of it.
"""

from clawstream.agent_flow import flow
from clawstream.agent_flow.environments import reasoning_gym

FEW_WORDS = 100


def environment(name, split):
    scored = reasoning_gym.environment(name, split)

    @flow(group_size=8, timeout_s=120)
    async def brief(task, rollout):
        right = await scored(task, rollout)
        reply = rollout.chats[-1][-1]
        words = len((reply.get("content") or "").split())
        return {"right": right, "brief": 0.1 * (words <= FEW_WORDS)}

    brief.tasks(scored.source)
    brief.lifespan(scored.while_played)
    return brief
