"""Exit codes: one table, in the code and in the documentation, and no traceback where a message says what to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from runtime.errors import PlumbingError
from runtime.exit_codes import MEANINGS, NO_RESTART, exit_code
from runtime.kafka import Fenced, KafkaError, SourceTruncated, Unavailable
from runtime.ports import PortTaken
from runtime.supervisor import AlreadyRunning
from schemas.errors import SettingsError

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SettingsError(), 2), (Unavailable(), 69), (KafkaError(), 1), (PlumbingError(), 1), (AlreadyRunning(), 75), (PortTaken(), 75),
        (Fenced(), 78), (SourceTruncated(), 79), (ValueError(), 70), (MemoryError(), 70),
    ],
)  # fmt: skip
def test_each_error_has_its_code(error: Exception, code: int) -> None:
    assert exit_code(error) == code


def test_the_documentation_has_the_same_table() -> None:
    rows = [f"| {m.code} | {m.meaning} | {m.action} | {'yes' if m.restarted else 'no'} |" for m in MEANINGS]
    assert "\n".join(rows) in (ROOT / "docs" / "operating.md").read_text()
    assert frozenset({0, 2, 78, 79}) == NO_RESTART


@pytest.mark.parametrize(
    ("error", "code", "has_traceback"),
    [
        ("schemas.errors:SettingsError", 2, False),
        ("runtime.kafka:Unavailable", 69, False),
        ("builtins:ValueError", 70, True),
    ],
)
def test_a_process_dies_with_its_code_and_a_traceback_only_of_what_is_unforeseen(
    error: str, code: int, has_traceback: bool
) -> None:
    module, _, name = error.partition(":")
    program = (
        f"from {module} import {name}; from runtime.lifecycle import run_async; from schemas.settings import Settings\n"
        f"async def main(settings, stop):\n    raise ExceptionGroup('a task has failed', [{name}('why')])\n"
        "run_async('p', Settings(), main)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == code and '"error": "why"' in done.stderr
    assert ('"exception": ' in done.stderr) == has_traceback
