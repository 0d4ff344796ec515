"""A verifiers taskset with a tool server: word problems and a calculator.

make environments
clawstream flow run env=verifiers:examples/verifiers_calculator.py size=100 concurrency=4
"""

import random
import re

import verifiers.v1 as vf


class Calculator(vf.Toolset[vf.ToolsetConfig, vf.State]):
    TOOL_PREFIX = "calculator"

    @vf.tool
    async def multiply(self, a: int, b: int) -> str:
        """Multiply two whole numbers."""
        return str(a * b)


class Problem(vf.TaskData):
    answer: int


class ProblemTask(vf.Task[Problem]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        numbers = re.findall(r"-?\d+", (trace.last_reply or "").replace(",", ""))
        return float(numbers[-1:] == [str(self.data.answer)])

    @vf.reward(weight=0.1)
    async def used_the_tool(self, trace: vf.Trace) -> float:
        return float(trace.num_turns > 1)


class Problems(vf.Taskset[ProblemTask]):
    INFINITE = True

    @classmethod
    def toolsets(cls, config):
        return [Calculator(vf.ToolsetConfig())]

    def load(self):
        rng = random.Random(0)
        while True:
            boxes, apples = rng.randint(2, 99), rng.randint(2, 99)
            prompt = f"{boxes} boxes hold {apples} apples each. How many apples are there?"
            yield ProblemTask(Problem(prompt=prompt, answer=boxes * apples), self.config.task)


__all__ = ["Problems"]

if __name__ == "__main__":  # how verifiers starts the tool server
    Calculator.run()
