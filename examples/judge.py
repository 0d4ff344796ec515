"""A task without a formula for its reward: a judge grades the replies by the rubric of judge.yaml.

clawstream up --config examples/judge.yaml
clawstream flow run examples/judge.py:explain
"""

from itertools import product

from clawstream.agent_flow import flow

THINGS = ("a magnet", "a rainbow", "an echo", "yeast", "a shadow", "rust", "a tide", "a compass")
READERS = ("a child of five", "a cook", "an engineer", "somebody who learns English")


@flow(group_size=8, timeout_s=120)
async def explain(task, rollout):
    await rollout.chat(task["question"])  # no reward: that is for the judge


@explain.tasks
def tasks():
    for number, (thing, reader) in enumerate(product(THINGS, READERS)):
        question = f"Explain {thing} to {reader} in at most two sentences."
        yield {"id": number, "question": question}
