"""The name under which a stream job's worker joins its consumer group."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from clawstream.ops.up import of_children
from clawstream.schemas.settings import JobsSettings, Settings
from clawstream.stream_jobs.worker.member_name import worker_name

NAME = (
    "from clawstream.schemas.settings import JobsSettings; "
    "from clawstream.stream_jobs.worker.member_name import worker_name; "
    "print(worker_name(JobsSettings()))"
)


@pytest.mark.slow
def test_two_processes_with_default_settings_have_two_names() -> None:
    other = subprocess.run(
        [sys.executable, "-c", NAME], capture_output=True, text=True, timeout=120, check=True
    )
    assert other.stdout.strip() != worker_name(JobsSettings()) == worker_name(JobsSettings())


def test_a_name_that_is_set_stays_so_a_restart_gets_its_partitions_back_at_once() -> None:
    assert worker_name(JobsSettings(worker_id="7")) == "7"


@pytest.mark.parametrize(
    ("asked", "given"), [(None, f"up-{socket.gethostname()}"), ("mine", "mine")]
)
def test_up_gives_its_workers_one_name_for_all_their_restarts(
    asked: str | None, given: str
) -> None:
    assert (
        of_children(Settings.model_validate({"jobs": {"worker_id": asked}})).jobs.worker_id == given
    )
