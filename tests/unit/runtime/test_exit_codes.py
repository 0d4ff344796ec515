"""Test the exit codes: one table in the code and in the documentation.

A command prints no traceback where a message gives the remedy.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from clawstream.gateway.durability.spool import lock
from clawstream.gateway.errors import GatewayError, SpoolFailed, SpoolTaken
from clawstream.rollout.errors import RolloutError
from clawstream.runtime.errors import PlumbingError
from clawstream.runtime.exit_codes import MEANINGS, NO_RESTART, exit_code
from clawstream.runtime.kafka import Fenced, KafkaError, SourceTruncated, Unavailable
from clawstream.runtime.process.ports import PortTaken
from clawstream.runtime.process.supervisor import AlreadyRunning
from clawstream.schemas.errors import ForeseenError, InvalidId, SchemaError, SettingsError
from clawstream.stream_jobs.errors import StreamJobError
from clawstream.trainer.errors import TrainerError

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SettingsError(), 2), (Unavailable(), 69), (KafkaError(), 1), (PlumbingError(), 1),
        (AlreadyRunning(), 75), (PortTaken(), 75),
        (Fenced(), 78), (SourceTruncated(), 79), (ValueError(), 70), (MemoryError(), 70),
        (InvalidId(), 2),
        (SpoolTaken(""), 75), (SpoolFailed(""), 1),
    ],
)  # fmt: skip
def test_each_error_has_its_code(error: Exception, code: int) -> None:
    assert exit_code(error) == code


def test_the_documentation_has_the_same_table() -> None:
    rows = [
        f"| {m.code} | {m.meaning} | {m.action} | {'yes' if m.restarted else 'no'} |"
        for m in MEANINGS
    ]
    assert "\n".join(rows) in (ROOT / "docs" / "operating.md").read_text()
    assert frozenset({0, 2, 78, 79}) == NO_RESTART


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "code", "has_traceback"),
    [
        ("clawstream.schemas.errors:SettingsError", 2, False),
        ("clawstream.runtime.kafka:Unavailable", 69, False),
        ("clawstream.trainer.errors:InvalidCheckpoint", 1, False),
        ("clawstream.rollout.errors:ServerFailed", 1, False),
        ("clawstream.stream_jobs.errors:PolicyRefused", 1, False),
        ("clawstream.gateway.errors:NotConfigured", 1, False),
        ("builtins:ValueError", 70, True),
    ],
)
def test_a_process_dies_with_its_code_and_a_traceback_only_of_what_is_unforeseen(
    error: str, code: int, has_traceback: bool
) -> None:
    module, _, name = error.partition(":")
    program = (
        f"from {module} import {name}; "
        "from clawstream.runtime.process.lifecycle import run_async; "
        "from clawstream.schemas.settings import Settings\n"
        "async def main(settings, stop):\n    raise ExceptionGroup('a task has failed', "
        f"[{name}('why')])\n"
        "run_async('p', Settings(), main)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == code and '"error": "why"' in done.stderr
    assert ('"exception": ' in done.stderr) == has_traceback


def test_the_root_of_every_package_is_of_the_foreseen() -> None:
    """Check that every package's error root is an expected error.

    A package with another root would end its process with the exit code of a bug.
    """
    roots = [GatewayError, PlumbingError, RolloutError, SchemaError, StreamJobError, TrainerError]
    assert [root.__bases__ for root in roots] == [(ForeseenError,)] * len(roots)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "code", "traces"),
    [
        ("clawstream.schemas.errors:UnknownSchema", 1, 0),
        ("clawstream.schemas.errors:InvalidId", 2, 0),
        ("builtins:ValueError", 70, 1),
    ],
)
def test_a_command_ends_as_a_process_does(error: str, code: int, traces: int) -> None:
    module, _, name = error.partition(":")
    program = (
        f"import sys; from {module} import {name}; from clawstream.cli.main import app, main\n"
        f"@app.command()\ndef broken() -> None:\n    raise {name}('why')\n"
        "sys.argv = ['clawstream', 'broken']; main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr.count("Traceback")) == (
        code,
        traces,
    ) and "why" in done.stderr


@pytest.mark.slow
def test_a_second_gateway_on_a_spool_says_so_without_a_traceback(tmp_path: Path) -> None:
    held = lock(tmp_path / "spool" / "gateway-0")
    try:
        words = ["gateway", f"data_dir={tmp_path}", "kafka.bootstrap_servers=127.0.0.1:1"]
        done = subprocess.run(
            [sys.executable, "-m", "clawstream", *words],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        os.close(held)
    assert done.returncode == 75
    assert (
        "give every gateway its own gateway.gateway_id" in done.stderr
        and "Traceback" not in done.stderr
    )
