"""Store the decision state in a file, so that a restart need not read the whole journal.

The state is a function of the journal up to one record, and the file names that record
(`JournalPosition`). A checkpoint that matches the journal is therefore correct, whoever wrote it
and when. If it is damaged or belongs to another journal, the journal is read from its beginning.
The file may be deleted at any time.
"""

from __future__ import annotations

import base64
import binascii
import json
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from clawstream.runtime.atomic_file import write_durably
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.errors import Undecodable, UnknownSchema
from clawstream.schemas.records import PolicyApplied, RolloutBudget
from clawstream.stream_jobs.admit.decisions.budget import BudgetFold
from clawstream.stream_jobs.admit.decisions.compact_map import CompactMap
from clawstream.stream_jobs.admit.decisions.rounds import ClosedRounds, MissingMembers, Rounds
from clawstream.stream_jobs.admit.decisions.state import DecisionState
from clawstream.stream_jobs.admit.group import GroupKey
from clawstream.stream_jobs.errors import StreamJobError

FORMAT = b"clawstream decisions 4\n"
"""Take another number when the bytes are read differently, or a journal folds to another state."""
SAVE_EVERY, SAVE_SHARE = 50_000, 40
"""Writes a checkpoint every max(SAVE_EVERY, decided / SAVE_SHARE) decided trajectories."""
SAVE_AT_CLOSE = 1000
"""Decided trajectories since the last checkpoint that are worth one at an orderly end."""
_LENGTH = struct.Struct("<Q")
_SUM_BYTES = 32


class UnusableCheckpoint(StreamJobError):
    """A checkpoint cannot be used; the message says why. The journal is read from its beginning."""


class JournalPosition(NamedTuple):
    """The last journal record in a state: topic id, offset, and hash of the record's value."""

    topic_id: str
    offset: int
    digest: str

    @classmethod
    def of(cls, topic_id: str, offset: int, value: bytes | None) -> JournalPosition:
        """Return the position of a record."""
        return cls(topic_id, offset, blake2b(value or b"", digest_size=16).hexdigest())


def serialize(state: DecisionState, position: JournalPosition, codec: Codec) -> Iterator[bytes]:
    """Return the bytes of the state as it is now; later changes do not affect them.

    Takes about 1 ms, plus 5 us for each entry of `ClosedRounds.others`.
    """
    head = json.dumps(_plain(state, position, codec)).encode()
    tables = (state.decisions.copy(), state.rounds.compact.copy())

    def chunks() -> Iterator[bytes]:
        yield FORMAT + _LENGTH.pack(len(head)) + head
        for table in tables:
            yield from table.chunks()

    def with_sum() -> Iterator[bytes]:
        total = blake2b(digest_size=_SUM_BYTES)
        for chunk in chunks():
            total.update(chunk)
            yield chunk
        yield total.digest()

    return with_sum()


def deserialize(data: bytes, codec: Codec) -> tuple[DecisionState, JournalPosition]:
    """Return the state and position from the bytes of `serialize`.

    Raises:
        UnusableCheckpoint: The bytes are damaged or of another format.
    """
    if not data.startswith(FORMAT):
        raise UnusableCheckpoint(f"begins with {data[: len(FORMAT)]!r}: not of this release")
    body, total = memoryview(data)[:-_SUM_BYTES], data[-_SUM_BYTES:]
    if blake2b(body, digest_size=_SUM_BYTES).digest() != total:
        raise UnusableCheckpoint("its checksum differs: it is damaged")
    try:
        at = len(FORMAT) + _LENGTH.size
        end = at + _LENGTH.unpack_from(body, len(FORMAT))[0]
        plain = json.loads(bytes(body[at:end]))
        decisions, rest = CompactMap.of_bytes(body[end:])
        closed, rest = CompactMap.of_bytes(rest)
        if rest:
            raise ValueError(f"{len(rest)} bytes too many")
        return _state_of(plain, decisions, closed, codec), JournalPosition(*plain["position"])
    except (
        struct.error,
        ValueError,
        KeyError,
        TypeError,
        binascii.Error,
        Undecodable,
        UnknownSchema,
    ) as e:
        raise UnusableCheckpoint(f"{type(e).__name__}: {e}") from e


def _plain(state: DecisionState, position: JournalPosition, codec: Codec) -> dict[str, Any]:
    def text(record: PolicyApplied | RolloutBudget | None) -> str | None:
        return None if record is None else base64.b64encode(codec.encode(record)).decode()

    return {
        "position": position,
        "others": [[gid, r.spans, r.missing_members] for gid, r in state.rounds.others.items()],
        "refused_members": [[*key, count] for key, count in state.refused_members.items()],
        "turned_away": [[*key, count] for key, count in state.turned_away.items()],
        "next_seq": state.next_seq,
        "decided_count": state.decided_count,
        "topic_id": state.topic_id,
        "newest": text(state.newest),
        "of_settings": text(state.of_settings),
        "applied": [text(record) for record in state.applied],
        "input_from": state.input_from,
        "stepped_to": state.stepped_to,
        "input_to": state.input_to,
        "budget": text(None if state.budget is None else state.budget.budget()),
    }


def _state_of(
    plain: dict[str, Any], decisions: CompactMap, closed: CompactMap, codec: Codec
) -> DecisionState:
    def record(text: str | None) -> Any:
        return None if text is None else codec.decode(base64.b64decode(text, validate=True))

    def counts(rows: list[Any]) -> Counter[GroupKey]:
        return Counter({(gid, number): count for gid, number, count in rows})

    others = (
        (
            gid,
            Rounds(
                tuple((first, end) for first, end in spans),
                tuple(MissingMembers(*m) for m in missing),
            ),
        )
        for gid, spans, missing in plain["others"]
    )
    return DecisionState(
        decisions,
        ClosedRounds(closed, others),
        counts(plain["refused_members"]),
        counts(plain["turned_away"]),
        plain["next_seq"],
        plain["decided_count"],
        record(plain["newest"]),
        record(plain["of_settings"]),
        plain["topic_id"],
        [record(text) for text in plain["applied"]],
        plain["input_from"],
        plain["stepped_to"],
        plain["input_to"],
        None if plain["budget"] is None else BudgetFold.of(record(plain["budget"])),
    )


class CheckpointFile:
    """The checkpoint of one run and channel, written by a thread. Logs failures and continues."""

    def __init__(self, path: Path, codec: Codec, log: Any) -> None:
        self._path, self._codec, self._log = path, codec, log.bind(checkpoint=str(path))
        self._saved_count = 0
        self._writing: threading.Thread | None = None

    def load(self, topic_id: str, end: int) -> tuple[DecisionState, JournalPosition] | None:
        """Load the checkpoint of a journal; on failure log the reason and return None.

        The caller must check that the journal still holds the record of the position.

        Args:
            topic_id: Id of the journal topic.
            end: End offset of the journal.
        """
        try:
            # A process that was killed while it wrote leaves a draft.
            for draft in self._path.parent.glob(f".{self._path.name}.*"):
                draft.unlink(missing_ok=True)
            state, position = deserialize(self._path.read_bytes(), self._codec)
        except FileNotFoundError:
            return None
        except (OSError, UnusableCheckpoint) as e:
            self.reject(str(e))
            return None
        if position.topic_id == topic_id and position.offset < end:
            self._saved_count = state.decided_count
            return state, position
        self.reject(
            f"it is of the journal {position.topic_id} to offset {position.offset}; this is "
            f"{topic_id} and ends at {end}"
        )
        return None

    def reject(self, why: str) -> None:
        """Log why the journal is read from its beginning."""
        self._saved_count = 0
        self._log.warning("checkpoint_not_used", why=why)

    def save_if_due(self, state: DecisionState, position: JournalPosition) -> None:
        """Start writing the state if enough was decided since the last checkpoint.

        Args:
            position: The last record applied to the state.
        """
        busy = self._writing is not None and self._writing.is_alive()
        if not busy and state.decided_count - self._saved_count >= max(
            SAVE_EVERY, len(state.decisions) // SAVE_SHARE
        ):
            self._begin(state, position)

    def close(self, state: DecisionState, position: JournalPosition | None) -> None:
        """Write a last checkpoint if it saves time; return when no write is in progress."""
        if self._writing is not None:
            self._writing.join()
        if position is not None and state.decided_count - self._saved_count >= SAVE_AT_CLOSE:
            self._begin(state, position).join()

    def _begin(self, state: DecisionState, position: JournalPosition) -> threading.Thread:
        self._saved_count = state.decided_count
        chunks = serialize(state, position, self._codec)
        self._writing = threading.Thread(
            target=self._write,
            args=(chunks, state.decided_count, position.offset),
            name="checkpoint",
            daemon=True,
        )
        self._writing.start()
        return self._writing

    def _write(self, chunks: Iterator[bytes], decided_count: int, offset: int) -> None:
        begun = time.monotonic()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_durably(self._path, chunks)
        except OSError as e:
            self._log.warning("checkpoint_not_written", error=str(e), next_after=SAVE_EVERY)
            return
        seconds = round(time.monotonic() - begun, 3)
        self._log.info(
            "checkpoint_written", trajectories=decided_count, journal_offset=offset, seconds=seconds
        )
