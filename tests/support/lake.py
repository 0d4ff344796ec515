"""The lake writer and its maintenance as real processes on a real Kafka: inputs and tables."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from support.processes import Processes

from clawstream.runtime.kafka import Producer
from clawstream.runtime.process.config import overrides_of
from clawstream.schemas import records
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.settings import Settings
from clawstream.schemas.tokens import pack_ids
from clawstream.stream_jobs.lake.delta.table import LakeMissing
from clawstream.stream_jobs.lake.main import dataset, open_table

WRITER = (
    "import sys; from clawstream.runtime.process.config import load; "
    "from clawstream.stream_jobs.lake.main import main; "
    "main(load(None, sys.argv[1:], {}))"
)
Eventually = Callable[..., Any]


class Writers(Processes):
    """The writers and maintenance processes of one installation. All log as `lake`."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings.data_dir)
        self.settings = settings

    def write(self, **lake: Any) -> subprocess.Popen[bytes]:
        """Start a writer. lake: settings of the lake."""
        words = [*overrides_of(self.settings), *(f"lake.{k}={v}" for k, v in lake.items())]
        return self.start("lake", [sys.executable, "-c", WRITER, *words], stdin=subprocess.DEVNULL)

    def maintain(self) -> subprocess.Popen[bytes]:
        """Start a maintenance process as a writer does."""
        command = [sys.executable, "-m", "clawstream.stream_jobs.lake.delta.maintenance"]
        process = self.start("lake", command, stdin=subprocess.PIPE)
        assert process.stdin is not None
        with process.stdin as stdin:
            stdin.write(self.settings.model_dump_json().encode())
        return process


@contextmanager
def running(settings: Settings) -> Iterator[Writers]:
    """Run the processes of the lake; print their logs at the end."""
    writers = Writers(settings)
    try:
        with writers:
            yield writers
    finally:
        print(writers.log("lake"))


def column(settings: Settings, table: str, name: str) -> list[Any]:
    """Return the current content of a column of the lake; empty when the table does not exist."""
    options = settings.lake.storage_options
    try:
        opened = open_table(settings.lake_uri, table, options)
    except LakeMissing:
        return []
    found = dataset(opened, options).to_table(columns=[name])
    return found.column(name).to_pylist()  # type: ignore[no-any-return]


def a_step(number: int) -> records.Step:
    """Return step `number` of run r; its prompt has number % 50 tokens."""
    key = f"k{number % 17}"
    return records.Step(
        step_id=f"{key}~{number:08d}.0", run_id="r", trajectory_key=key,
        call_id=f"{key}~{number:08d}", choice_index=0, protocol="openai.chat", model="policy",
        status="ok", streamed=False, request_json=b"{}", response_json=b"{}",
        prompt_token_ids=pack_ids(range(number % 50)), gateway_id="g", received_at=number,
        finished_at=number,
    )  # fmt: skip


def a_reward(number: int, **changes: Any) -> records.Reward:
    """Return reward `w<number>` of run r, trajectory k."""
    values: dict[str, Any] = {
        "event_id": f"w{number}", "run_id": "r", "trajectory_key": "k", "source": "rule",
        "name": "f", "function_version": "1", "value": float(number), "reward_revision": 0,
        "created_at": number,
    }  # fmt: skip
    return records.Reward(**values | changes)


def put_steps(producer: Producer, settings: Settings, numbers: Iterable[int]) -> None:
    """Write steps with these numbers; all are on the log when this function returns."""
    codec = Codec()
    for number in numbers:
        step = a_step(number)
        producer.put(settings.kafka.topics.steps, step.trajectory_key.encode(), codec.encode(step))
    producer.flush()
