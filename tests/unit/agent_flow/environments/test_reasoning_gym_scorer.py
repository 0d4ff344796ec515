"""The process that scores answers, with a stand-in for the library that evaluates each answer."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clawstream.agent_flow import environments
from clawstream.agent_flow.environments.reasoning_gym_pool import ScorerPool

SCRIPT = Path(environments.__file__).with_name("reasoning_gym_scorer.py")
LIBRARY = """
import os

class Dataset:
    def score_answer(self, answer, entry):
        return eval(answer) == entry["answer"]

def create_dataset(name, **config):
    return Dataset()
"""


def scored(tmp_path: Path, answers: list[str]) -> list[dict[str, Any]]:
    """Return the replies to answers, each of which should be 4."""
    (tmp_path / "reasoning_gym.py").write_text(LIBRARY)
    entry = base64.b64encode(pickle.dumps({"answer": 4})).decode()
    done = subprocess.run(
        [sys.executable, "-P", SCRIPT, json.dumps({"name": "any", "config": {}})],
        input="".join(json.dumps({"entry": entry, "answer": a}) + "\n" for a in answers),
        env={"PYTHONPATH": str(tmp_path), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=True,
    )
    ready, *replies = (json.loads(line) for line in done.stdout.splitlines())
    assert ready == {"ready": True}
    return replies


def test_each_answer_is_scored_in_a_fork_of_its_own(tmp_path: Path) -> None:
    assert scored(
        tmp_path,
        [
            "2 + 2",
            "os._exit(1)",
            "setattr(Dataset, 'score_answer', lambda *_: 1.0) or 1",
            "os.write(1, b'forged') and 3",
            "bytearray(1 << 34)",
            "exit()",
            "nowhere",
            "2 + 2",
        ],
    ) == [
        {"score": 1.0},
        {"score": 0.0},
        {"score": 0.0},
        {"score": 0.0},
        {"score": 0.0},
        {"score": 0.0},
        {"error": "NameError: name 'nowhere' is not defined"},
        {"score": 1.0},
    ]


def test_processes_that_an_answer_starts_end_with_it(tmp_path: Path) -> None:
    """One that holds the pipe of the score does not delay it."""
    assert scored(tmp_path, ["os.fork() or __import__('signal').pause()"]) == [{"score": 0.0}]


def test_answers_are_scored_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two answers ends only while the other one is scored, too."""
    (tmp_path / "reasoning_gym.py").write_text(LIBRARY)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    async def scenario() -> list[float]:
        scorers = ScorerPool("any", {}, size=2)
        async with scorers.running():
            return await asyncio.gather(
                scorers.score(f"open({str(pipe)!r}).read() and 4", {"answer": 4}),
                scorers.score(f"open({str(pipe)!r}, 'w').write('x') and 4", {"answer": 4}),
                scorers.score("3", {"answer": 4}),
            )

    assert asyncio.run(scenario()) == [1.0, 1.0, 0.0]
