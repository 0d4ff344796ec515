"""Grade what a command has printed: 1.0 if the last number of its last line is the answer."""

from clawstream.agent_flow.rewards import last_number


def grade(task, result):
    last = (result.stdout.strip().splitlines() or [""])[-1]
    return last_number(last, task["answer"])
