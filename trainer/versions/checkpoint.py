"""Checkpoints: everything that a resume needs, written in the background.

`<checkpoint_dir>/<run>/<sync index>.<attempt>/` is the checkpoint of that version. It holds the
shards of torch.distributed.checkpoint, `model/` and, with a critic, `critic/` (configuration and
tokenizer), and `clawstream.json`. With `trainer.checkpoint_uri` it is copied there, and copied back
where `checkpoint_dir` lacks it or has it damaged. The sampler has no state of its own: batch order
is the position, shuffles and learning rate follow from it. A checkpoint counts once it is complete
and its version is on the weights log.

A copy is complete before the next checkpoint is written: the writer waits for it, and a start
completes the copy of the checkpoint that it resumes from. So of a chain of versions only the newest
copy may be incomplete, and the one before, which is always kept, is complete.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.stateful import Stateful

from clawstream.runtime.logs import logger
from clawstream.schemas.errors import SettingsError
from clawstream.schemas.ids import Version
from clawstream.schemas.records import WeightVersion
from clawstream.trainer.errors import CheckpointFailed, CheckpointLost, InvalidCheckpoint
from clawstream.trainer.model.state import ModelState
from clawstream.trainer.versions.directory import (
    VersionState,
    directory_of,
    download,
    new_directory,
    read_info,
    temporary_directory,
    upload,
    verify,
    versions_in,
)
from clawstream.trainer.versions.history import version_of

MODEL, CRITIC = "model", "critic"
PLATFORM = "platform.json"
State = Mapping[str, Stateful]
"""The parts of a checkpoint by name. Parts hand out tensors, `DTensor`s included, by reference."""


class CheckpointWriter:
    """Write one checkpoint at a time, in a thread.

    Attributes:
        newest: the newest complete checkpoint of the surviving chain; None before the first.
    """

    def __init__(
        self,
        root: Path,
        uri: str | None,
        newest: VersionState | None,
        group: ProcessGroup | None = None,
    ) -> None:
        """Args:
        root: of the checkpoints.
        uri: of their copies; None: there are none.
        newest: the checkpoint that the run resumed from.
        group: with more than one process, a gloo group that nothing else uses: the thread's
            collectives run at the same time as the training step's.
        """
        self.newest = newest
        self._root, self._uri, self._group = root, uri, group
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None

    def start(
        self,
        version: VersionState,
        state: State,
        models: Mapping[str, Callable[[Path], None]],
    ) -> None:
        """Copy the state to the CPU, then write it in the background; call on every process.

        Waits for the checkpoint before, so that at most one copy is in memory.

        Args:
            version: that the state belongs to.
            state: the parts.
            models: name of a directory to what writes a model's configuration to it.
        """
        self.wait()
        stager = DefaultStager(StagingOptions(False, False, False, False))
        try:
            copy = stager.stage({name: part.state_dict() for name, part in state.items()})
        finally:
            stager.close()
        self._writing = self._thread.submit(self._write, version, copy, models)

    def wait(self) -> None:
        """Wait until the checkpoint in progress is complete; raise its error.

        Raises:
            OSError, CheckpointFailed, StorageFailed: It could not be written or copied.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def raise_if_failed(self) -> None:
        """Raise the error of a checkpoint that failed; do not wait for one in progress."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def _write(
        self, version: VersionState, copy: Any, models: Mapping[str, Callable[[Path], None]]
    ) -> None:
        if self._group is not None and self._group.rank() != 0:
            self._write_shards(copy, temporary_directory(self._root, version.version))
        else:
            with new_directory(self._root, version) as tmp:
                for name, save_configuration in models.items():
                    save_configuration(tmp / name)
                (tmp / PLATFORM).write_text(json.dumps(platform(self._group)))
                self._write_shards(copy, tmp)
            if self._uri is not None:
                directory = directory_of(self._root, version.version)
                upload(directory, self._uri, read_info(directory))
        self.newest = version

    def _write_shards(self, copy: Any, directory: Path) -> None:
        _expect_one_process(self._group)
        writer = FileSystemWriter(directory)
        with _explained(directory):
            state_dict_saver.save(copy, storage_writer=writer, process_group=self._group)


def newest(
    root: Path, uri: str | None, versions: Sequence[WeightVersion]
) -> tuple[VersionState, Path] | None:
    """Find the newest version (log order) with a complete checkpoint.

    Args:
        root: of the checkpoints. One that is missing or damaged here is copied from `uri`.
        uri: of their copies; None: there are none.
        versions: of the run.

    Returns:
        Its state and directory; None when there are no versions.

    Raises:
        CheckpointLost: there are versions, but no checkpoint of them.
        StorageFailed: copies cannot be read.
    """
    problems = []
    copies = versions_in(uri, versions[-1].run_id) if uri is not None and versions else {}
    for version in reversed(versions):
        try:
            state = _state_of(root, uri, copies, version_of(version))
        except InvalidCheckpoint as e:
            problems.append(str(e))
            logger().warning("checkpoint_not_usable", version=version.version_id, error=str(e))
            continue
        if state is not None:  # most versions have none
            return state, directory_of(root, state.version)
    if not versions:
        return None
    raise CheckpointLost(
        f"run {versions[-1].run_id} has {len(versions)} versions up to {versions[-1].version_id}, "
        f"but {root}{'' if uri is None else f' and {uri}'} has no whole checkpoint of any: "
        f"{'; '.join(problems) or 'there is none'}. "
        "Restore it, or train on under another run_id with trainer.model_path set to published "
        "weights"
    )


def _state_of(
    root: Path, uri: str | None, copies: Collection[Version], version: Version
) -> VersionState | None:
    """Return the state of a checkpoint, copied from `uri` if necessary; None: there is none.

    copies: versions with one at `uri`.
    """
    directory = directory_of(root, version)
    if directory.exists():
        try:
            return verify(directory, version)
        except InvalidCheckpoint as e:
            if version not in copies:
                raise
            logger().warning("checkpoint_damaged", error=str(e), action="none: its copy is read")
    if uri is None or version not in copies:
        return None
    return download(uri, root, version)


def load(directory: Path, state: State, group: ProcessGroup | None = None) -> None:
    """Read a checkpoint into the parts; call on every process.

    The number of processes may differ from that of the writer.

    Raises:
        CheckpointFailed: The shards cannot be read.
        SettingsError: They are of another model.
    """
    wrote, here = json.loads((directory / PLATFORM).read_text()), platform(group)
    differing = {
        name: (wrote.get(name), here[name]) for name in here if wrote.get(name) != here[name]
    }
    if differing:
        logger().warning(
            "resumed_elsewhere",
            differing=differing,
            action="none needed; sums are rounded otherwise than in an uninterrupted run",
        )
    _expect_one_process(group)
    reader = FileSystemReader(directory)
    with _explained(directory):
        _check_names(directory, reader.read_metadata().state_dict_metadata.keys(), state)
        state_dict_loader.load(dict(state), storage_reader=reader, process_group=group)


def _check_names(directory: Path, stored: Collection[str], state: State) -> None:
    """Raise SettingsError when the tensors of a stored model are not those of the model here.

    torch ignores tensors that are stored and not asked for.
    """
    for part, content in state.items():
        if not isinstance(content, ModelState):
            continue
        there = {n.removeprefix(f"{part}.") for n in stored if n.startswith(f"{part}.")}
        if odd := sorted(there ^ content.state_dict().keys()):
            raise SettingsError(
                f"the checkpoint {directory} is of another model than this trainer makes from its "
                f"configuration: {len(odd)} tensors of {part} are only there or only here, for "
                f"example {', '.join(odd[:3])}; resume with the release of transformers that wrote "
                "it, or use another run_id"
            )


@contextmanager
def _explained(directory: Path) -> Iterator[None]:
    """Raise CheckpointFailed instead of torch's error, which no `except Exception` catches."""
    try:
        yield
    except CheckpointException as e:
        causes = "; ".join(f"process {rank}: {cause[0]!r}" for rank, cause in e.failures.items())
        raise CheckpointFailed(f"{directory}: {causes}") from e


def platform(group: ProcessGroup | None) -> dict[str, str | int]:
    """Return what the rounding of sums depends on besides the settings."""
    return {
        "torch": torch.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "processes": 1 if group is None else group.size(),
    }


def _expect_one_process(group: ProcessGroup | None) -> None:
    """Silence torch's warning that there is one process."""
    if group is None:
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or")
