"""Word problems with a calculator tool: `clawstream flow run examples/arithmetic.py:arithmetic`."""

import random

from clawstream.agent_flow import flow
from clawstream.agent_flow.rewards import last_number


def calculate(expression: str) -> str:
    """Compute an arithmetic expression of whole numbers, for example `3 * 12 + 4`."""
    if not set(expression) <= set("0123456789+-* ()") or "**" in expression:
        return "error: only digits, + - * and brackets"
    return str(eval(expression))


@flow(group_size=8, timeout_s=120)
async def arithmetic(task, rollout):
    reply = await rollout.chat(task["question"], tools=[calculate], max_turns=4)
    return last_number(reply.text, task["answer"])


@arithmetic.tasks
def tasks():
    rng = random.Random(0)
    for number in range(1000):
        boxes, apples, eaten = rng.randint(2, 9), rng.randint(3, 30), rng.randint(0, 5)
        yield {
            "id": number,
            "question": f"{boxes} boxes hold {apples} apples each. I eat {eaten}. How many remain?",
            "answer": boxes * apples - eaten,
        }
