"""The process that scores answers, with a stand-in for the library that evaluates each answer."""

from __future__ import annotations

import base64
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import agent_flow.environments

SCRIPT = Path(agent_flow.environments.__file__).with_name("reasoning_gym_scorer.py")
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
