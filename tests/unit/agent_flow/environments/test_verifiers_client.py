"""The client of the process that has verifiers, with another program in its place."""

from __future__ import annotations

import asyncio
import os
import select
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clawstream.agent_flow.child_environment import child_environment
from clawstream.agent_flow.environments.environment import Split, load_environment
from clawstream.agent_flow.environments.verifiers.client import PYTHON, Worker
from clawstream.agent_flow.errors import FlowError, RolloutFailed

PLACE: Any = SimpleNamespace(base_url="http://none/v1", api_key="k", model="m", sampling={})


def test_wrong_reply_fails_the_rollout_and_ends_all_processes(tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text(
        "#!/bin/sh\n"
        "setsid sleep 1000 & echo $! > " + str(tmp_path / "pid") + "\n"
        """echo '{"ready": true}'; read line; echo no JSON; sleep 1000\n"""
    )
    program.chmod(0o755)

    async def scenario() -> None:
        worker = Worker(program, {"id": "x", "config": {}}, tmp_path, tmp_path / "stderr")
        with pytest.raises(RolloutFailed, match="wrote no reply"):
            await worker.play(0, PLACE)
        await worker.stop()

    asyncio.run(scenario())
    with suppress(ProcessLookupError):  # it has ended and is reaped
        descriptor = os.pidfd_open(int((tmp_path / "pid").read_text()))
        assert select.select([descriptor], [], [], 60)[0]
        os.close(descriptor)


def test_seed_of_a_taskset_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "python").touch()
    monkeypatch.setenv(PYTHON, str(tmp_path / "python"))
    with pytest.raises(FlowError, match="seed=7 has no effect"):
        load_environment("verifiers:any", Split(seed=7))


def test_children_get_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "CLAWSTREAM_KAFKA__X", "JUDGE_KEY", "PLAIN"):
        monkeypatch.setenv(name, "1")
    given = child_environment({"JUDGE_KEY"})
    assert {"JUDGE_KEY", "PLAIN", "PATH"} <= given.keys()
    assert not {"HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "CLAWSTREAM_KAFKA__X"} & given.keys()
