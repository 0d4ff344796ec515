"""Tasks: mappings with an optional `id`, from a generator or a file."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

from clawstream.agent_flow.errors import FlowError

Task = Mapping[str, Any]
_FORBIDDEN = re.compile(r"[^A-Za-z0-9._:@=+-]")
LONGEST_ID = 110
"""Characters. A trajectory key has at most 200, also of the flow's name, numbers and an agent."""


def tasks_of_file(path: Path) -> Iterator[Task]:
    """Yield the tasks of a JSONL or Parquet file, or of a Hugging Face dataset on disk.

    Args:
        path: `*.jsonl`, `*.parquet`, or a directory written by `Dataset.save_to_disk`.

    Raises:
        FlowError: The file does not exist, or is of another kind.
    """
    if path.is_dir():
        files = sorted(path.glob("*.arrow"))
        if not files:
            raise FlowError(f"tasks={path}: no *.arrow file; Dataset.save_to_disk writes them")
        return (task for file in files for task in _arrow(file))
    if not path.is_file():
        raise FlowError(f"tasks={path}: no such file")
    if path.suffix == ".jsonl":
        return _jsonl(path)
    if path.suffix == ".parquet":
        return _parquet(path)
    raise FlowError(f"tasks={path}: must be *.jsonl, *.parquet, or a dataset directory")


def _jsonl(path: Path) -> Iterator[Task]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                task = json.loads(line)
            except ValueError as error:
                raise FlowError(f"{path}, line {number}: not JSON: {error}") from error
            if not isinstance(task, dict):
                raise FlowError(f"{path}, line {number}: not a JSON object")
            yield task


def _parquet(path: Path) -> Iterator[Task]:
    parquet = _pyarrow("parquet")
    for batch in parquet.ParquetFile(path).iter_batches(256):
        yield from batch.to_pylist()


def _arrow(path: Path) -> Iterator[Task]:
    pyarrow = _pyarrow("ipc")
    with path.open("rb") as file:
        for batch in pyarrow.open_stream(file):
            yield from batch.to_pylist()


def _pyarrow(module: str) -> Any:
    try:
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise FlowError("tasks in Parquet and Arrow files need the package pyarrow") from error
    return getattr(pyarrow, module)


def numbered(
    tasks: Iterable[Any],
    shard: tuple[int, int] = (0, 1),
    limit: int | None = None,
    shuffle: str | None = None,
    skip: int = 0,
) -> Iterator[tuple[str, Task]]:
    """Yield the id and the task of each task of this process, in order.

    An id depends only on the tasks before it, and is different for each task: a task without one
    has its position, and a repeated one a number.

    Args:
        tasks: Mappings.
        shard: This process's index and the number of processes that share the tasks.
        limit: Number of tasks of all processes.
        shuffle: Seed of the order; None: as they come. All tasks are read first.
        skip: Number of tasks at the start of the order, of all processes, that are left out.

    Raises:
        FlowError: A task is not a mapping.
    """
    index, processes = shard
    order: Iterable[tuple[str, Task]] = _identified(islice(tasks, limit))
    if shuffle is not None:
        order = list(order)
        Random(shuffle).shuffle(order)
    for position, found in enumerate(order):
        if position >= skip and position % processes == index:
            yield found


def _identified(tasks: Iterable[Any]) -> Iterator[tuple[str, Task]]:
    used, repeated = set[str](), Counter[str]()
    for number, task in enumerate(tasks):
        if not isinstance(task, Mapping):
            raise FlowError(f"task {number} is a {type(task).__name__}, not a mapping")
        name = first = id_text(task.get("id", number))
        while name in used:
            repeated[first] += 1
            name = f"{first}.{repeated[first]}"
        used.add(name)
        yield name, task


def id_text(value: Any, longest: int = LONGEST_ID) -> str:
    """Return an id as part of a group id: unchanged if it can be, else with its hash.

    Args:
        value: of a task, or the name of a flow.
        longest: characters of the result at most.
    """
    text = str(value)
    if text and len(text) <= longest and not _FORBIDDEN.search(text):
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return f"{_FORBIDDEN.sub('_', text)[: longest - 9]}-{digest}"


def metadata_of(task: Task) -> dict[str, Any]:
    """Return the task as JSON for reward functions and queries.

    Raises:
        FlowError: A value is not JSON.
    """
    try:
        return dict(json.loads(json.dumps(dict(task), allow_nan=False)))
    except (TypeError, ValueError) as error:
        raise FlowError(
            f"task {task.get('id', '')!r}: not JSON: {error}; keep such values out of the task"
        ) from error
