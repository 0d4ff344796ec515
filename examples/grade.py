"""Grade what a command has printed: 1.0 if its last line has the task's answer."""

import re


def grade(task, result):
    last = (result.stdout.strip().splitlines() or [""])[-1]
    return float(str(task["answer"]) in re.findall(r"\d+", last))
