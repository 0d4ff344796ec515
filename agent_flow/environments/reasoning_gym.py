"""Tasks of reasoning-gym: one question, one answer in <answer> tags, scored by its data set."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import reasoning_gym
from reasoning_gym.utils import SYSTEM_PROMPTS, extract_answer

from clawstream.agent_flow.environments.environment import Split
from clawstream.agent_flow.environments.reasoning_gym_pool import ScorerPool
from clawstream.agent_flow.errors import FlowError
from clawstream.agent_flow.flow import Flow, Limits
from clawstream.agent_flow.rollout import Rollout
from clawstream.agent_flow.tasks import Task
from clawstream.agent_flow.threads import in_thread

FORM = {"role": "system", "content": SYSTEM_PROMPTS["default"]}
REMEMBERED = 256
"""Tasks that are not generated again for each rollout of their group."""


def environment(name: str, split: Split) -> Flow:
    """Return the flow of a data set.

    Args:
        name: of the data set, for example chain_sum.
        split: `config` has the data set's own settings, for example `{"max_terms": 3}`.

    Raises:
        FlowError: There is no such data set, or a setting is wrong.
    """
    seeds = split.seeds
    config = {"seed": seeds.start, "size": len(seeds), **split.config}
    try:
        dataset = reasoning_gym.create_dataset(name, **config)
    except (ValueError, TypeError, AssertionError) as error:
        raise FlowError(f"env=reasoning_gym:{name}: {error}") from error
    entry_of = functools.lru_cache(REMEMBERED)(dataset.__getitem__)
    scorers = ScorerPool(name, config)

    async def play(task: Task, rollout: Rollout) -> Any:
        entry = await in_thread(entry_of, task["index"])
        question = {"role": "user", "content": entry["question"]}
        reply = await rollout.chat([FORM, question])
        return await scorers.score(extract_answer(reply.text), entry)

    def tasks() -> Iterator[Task]:
        for index in range(len(dataset)):
            entry = entry_of(index)
            yield {
                "id": seeds.start + index,
                "index": index,
                "question": entry["question"],
                "answer": str(entry["answer"]),
            }

    flow = Flow(play, Limits(), name)
    flow.tasks(tasks)
    flow.lifespan(scorers.running)
    return flow
