"""Reward functions for flows that give none, or for trajectories that are recorded already.

clawstream up 'jobs.reward_functions={"*": ["examples/reward_functions.py:right@1"]}'
clawstream flow exec tasks=examples/arithmetic.jsonl -- my-agent {question}
"""

import json

from clawstream.schemas.conversation import answer_in, loaded
from clawstream.schemas.numbers.text import last_number_in, number_in
from clawstream.schemas.records import Trajectory


def right(trajectory: Trajectory) -> float | None:
    """1.0 if the last number of the last reply is the task's answer."""
    answer = json.loads(trajectory.metadata_json or b"{}").get("answer")
    if answer is None or not trajectory.steps:
        return None  # nothing to compare: recorded as `no_reward`, which is not 0.0
    said = answer_in(loaded(trajectory.steps[-1].response_json)) or ""
    number = last_number_in(said)
    return float(number is not None and number.equals(number_in(answer)))
