"""The shell around a job: rebalances that come while another is under way, and how much is in memory at once."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from faust.types import TP

from runtime.kafka import Record
from schemas.settings import Settings
from stream_jobs import app
from stream_jobs.app import Shell
from stream_jobs.errors import Overtaken


class Job:
    """A job that says what happened to it. Its take-over waits for `go`, then raises `error` if there is one."""

    inputs: tuple[str, ...] = ("s", "r")
    tick_interval_s = 60.0

    def __init__(self) -> None:
        self.owned: set[int] = set()
        self.begun, self.go = asyncio.Event(), asyncio.Event()
        self.error: Exception | None = None

    async def assigned(self, partitions: Sequence[int]) -> Mapping[tuple[str, int], int]:
        assert not self.owned, "what was owned before was not released"
        self.begun.set()
        await self.go.wait()
        if self.error is not None:
            raise self.error
        self.owned = set(partitions)
        return {("s", p): 7 for p in partitions}

    async def revoked(self) -> None:
        self.owned = set()

    async def process(self, partition: int, records: Sequence[Record]) -> Mapping[str, int]:
        return {}

    async def tick(self) -> None: ...

    def stop(self) -> None: ...

    def close(self) -> None: ...


class Group:
    """What the shell asks of Faust's consumer."""

    async def _commit(self, offsets: Mapping[TP, int]) -> bool:
        return True

    def assignment(self) -> set[TP]:
        return {TP(t, p) for t in Job.inputs for p in (0, 1)}


@pytest.fixture
def died(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """Errors that would have ended the process."""
    errors: list[BaseException] = []
    monkeypatch.setattr(app, "die", errors.append)
    return errors


def shell_of(job: Job, tmp_path: Path) -> Any:
    shell: Any = Shell(Settings(data_dir=tmp_path), "test", job)
    shell._app = SimpleNamespace(consumer_generation_id=1, consumer=Group())
    return shell


@pytest.mark.parametrize("error", [None, Overtaken("by the other worker")])
def test_a_take_over_that_a_rebalance_overtakes_is_given_up(
    tmp_path: Path, died: list[BaseException], error: Exception | None
) -> None:
    async def main() -> None:
        job = Job()
        shell = shell_of(job, tmp_path)
        taking = asyncio.create_task(shell._assigned())
        await job.begun.wait()
        await shell._revoked()  # the generation is not known yet
        job.error = error
        job.go.set()
        await taking
        assert not job.owned and shell._position(("s", 0)) is None
        shell._app.consumer_generation_id, job.error = 2, None
        await shell._assigned()
        assert job.owned == {0, 1} and shell._position(("s", 0)) == 7
        await shell._assigned()  # without a revoke between: what was owned is released first
        assert job.owned == {0, 1}

    asyncio.run(main())
    assert not died


def test_who_is_overtaken_in_no_rebalance_dies(tmp_path: Path, died: list[BaseException]) -> None:
    async def main() -> None:
        job = Job()
        job.go.set()
        job.error = Overtaken("by a stranger")
        await shell_of(job, tmp_path)._assigned()

    asyncio.run(main())
    assert [str(e) for e in died] == ["by a stranger"]


def test_behind_a_small_fetch_more_is_waited_for_and_what_came_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "FETCH_PAUSE_S", 3600.0)

    async def main() -> None:
        shell = shell_of(Job(), tmp_path)
        place = TP("s", 0)
        records = [SimpleNamespace(offset=i, key=None, value=b"v", headers=()) for i in range(shell._batch_records + 1)]
        small = asyncio.create_task(shell._take({place: records[:1]}))
        assert await shell._inbox.batch() == [(1, {place: records[:1]})]
        assert not small.done()
        small.cancel()
        await shell._take({place: records[1:]})  # a whole batch: there is more where it came from

    asyncio.run(main())
