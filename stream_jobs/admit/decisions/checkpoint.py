"""The ledger of admission in a file: what spares a restart the reading of the whole journal, and nothing else.

A ledger is a function of the journal's records up to one of them, and the file says which (`Mark`). So whoever has written it, and whenever, it is
right; or it is not of this journal, or damaged, and then the journal is read from its beginning. It may be deleted at any time.
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

from runtime.atomic_file import write_durably
from schemas.codec.single_object import Codec
from schemas.errors import Undecodable, UnknownSchema
from schemas.records import PolicyApplied
from stream_jobs.admit.decisions.compact_map import Packed
from stream_jobs.admit.decisions.rounds import ClosedRounds, Owed, Rounds
from stream_jobs.admit.decisions.state import Ledger
from stream_jobs.admit.group import GroupKey
from stream_jobs.errors import StreamJobError

FORMAT = b"clawstream ledger 2\n"
"""Another number for everything that reads these bytes otherwise, or folds a journal to another ledger."""
EVERY, SHARE = 50_000, 40
"""Trajectories that are decided until the next one is written: that many, or one in so many of all, whichever is more."""
WORTH_IT = 1000
"""At the orderly end: reading fewer takes no longer than the file."""
_LENGTH = struct.Struct("<Q")
_SUM_BYTES = 32


class CheckpointFlaw(StreamJobError):
    """A checkpoint that can't be used; the message says why. The journal is read from its beginning."""


class Mark(NamedTuple):
    """The last record that a ledger knows: its journal's topic id, its offset there, and the hash of its value."""

    topic_id: str
    offset: int
    digest: str

    @classmethod
    def of(cls, topic_id: str, offset: int, value: bytes | None) -> Mark:
        """That of a record."""
        return cls(topic_id, offset, blake2b(value or b"", digest_size=16).hexdigest())


def written(ledger: Ledger, mark: Mark, codec: Codec) -> Iterator[bytes]:
    """The bytes of a ledger as it is now, whatever it takes while they are asked for. Costs a millisecond, and 5 µs for each of
    `ClosedRounds.others`.
    """
    head = json.dumps(_plain(ledger, mark, codec)).encode()
    tables = (ledger.decisions.copy(), ledger.rounds.packed.copy())

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


def read(data: bytes, codec: Codec) -> tuple[Ledger, Mark]:
    """What `written` gave. Raises CheckpointFlaw."""
    if not data.startswith(FORMAT):
        raise CheckpointFlaw(f"begins with {data[: len(FORMAT)]!r}: not of this release")
    body, total = memoryview(data)[:-_SUM_BYTES], data[-_SUM_BYTES:]
    if blake2b(body, digest_size=_SUM_BYTES).digest() != total:
        raise CheckpointFlaw("its checksum is another one: it is damaged")
    try:
        at = len(FORMAT) + _LENGTH.size
        end = at + _LENGTH.unpack_from(body, len(FORMAT))[0]
        plain = json.loads(bytes(body[at:end]))
        decisions, rest = Packed.of_bytes(body[end:])
        closed, rest = Packed.of_bytes(rest)
        if rest:
            raise ValueError(f"{len(rest)} bytes too many")
        return _ledger(plain, decisions, closed, codec), Mark(*plain["mark"])
    except (
        struct.error,
        ValueError,
        KeyError,
        TypeError,
        binascii.Error,
        Undecodable,
        UnknownSchema,
    ) as e:
        raise CheckpointFlaw(f"{type(e).__name__}: {e}") from e


def _plain(ledger: Ledger, mark: Mark, codec: Codec) -> dict[str, Any]:
    def applied(record: PolicyApplied | None) -> str | None:
        return None if record is None else base64.b64encode(codec.encode(record)).decode()

    return {
        "mark": mark,
        "others": [[gid, r.spans, r.owed] for gid, r in ledger.rounds.others.items()],
        "gone": [[*key, count] for key, count in ledger.gone.items()],
        "turned": [[*key, count] for key, count in ledger.turned.items()],
        "next_seq": ledger.next_seq, "told": ledger.told, "topic_id": ledger.topic_id,
        "newest": applied(ledger.newest), "of_settings": applied(ledger.of_settings),
        "applied": [applied(record) for record in ledger.applied],
        "input_from": ledger.input_from, "stepped_to": ledger.stepped_to, "input_to": ledger.input_to,
    }  # fmt: skip


def _ledger(plain: dict[str, Any], decisions: Packed, closed: Packed, codec: Codec) -> Ledger:
    def applied(text: str | None) -> PolicyApplied | None:
        if text is None:
            return None
        event = codec.decode(base64.b64decode(text, validate=True))
        if not isinstance(event, PolicyApplied):
            raise ValueError(f"a {type(event).__name__} where a policy should be")
        return event

    def counts(rows: list[Any]) -> Counter[GroupKey]:
        return Counter({(gid, number): count for gid, number, count in rows})

    others = (
        (gid, Rounds(tuple((first, end) for first, end in spans), tuple(Owed(*o) for o in owed)))
        for gid, spans, owed in plain["others"]
    )
    return Ledger(
        decisions, ClosedRounds(closed, others), counts(plain["gone"]), counts(plain["turned"]),
        plain["next_seq"], plain["told"], applied(plain["newest"]), applied(plain["of_settings"]), plain["topic_id"],
        [found for text in plain["applied"] if (found := applied(text)) is not None],
        plain["input_from"], plain["stepped_to"], plain["input_to"],
    )  # fmt: skip


class CheckpointFile:
    """Where the checkpoint of one run and channel lies. It is written on a thread of its own; what fails is logged, and admission goes on."""

    def __init__(self, path: Path, codec: Codec, log: Any) -> None:
        self._path, self._codec, self._log = path, codec, log.bind(checkpoint=str(path))
        self._told = 0
        self._writing: threading.Thread | None = None

    def load(self, topic_id: str, end: int) -> tuple[Ledger, Mark] | None:
        """What the file has of the journal of this topic id, which ends before offset `end`; None: nothing, and the log says why.

        That the journal still has the record of the mark is for the caller to see.
        """
        try:
            for draft in self._path.parent.glob(
                f".{self._path.name}.*"
            ):  # of one who was killed while writing it
                draft.unlink(missing_ok=True)
            ledger, mark = read(self._path.read_bytes(), self._codec)
        except FileNotFoundError:
            return None
        except (OSError, CheckpointFlaw) as e:
            self.refuse(str(e))
            return None
        if mark.topic_id == topic_id and mark.offset < end:
            self._told = ledger.told
            return ledger, mark
        self.refuse(
            f"it is of the journal {mark.topic_id} to offset {mark.offset}; this is {topic_id} and ends at {end}"
        )
        return None

    def refuse(self, why: str) -> None:
        """Say why the journal is read from its beginning."""
        self._told = 0
        self._log.warning("checkpoint_not_used", why=why)

    def keep(self, ledger: Ledger, mark: Mark) -> None:
        """Write it if enough has been decided since it was written last. mark: of the last record that the ledger has taken."""
        busy = self._writing is not None and self._writing.is_alive()
        if not busy and ledger.told - self._told >= max(EVERY, len(ledger.decisions) // SHARE):
            self._begin(ledger, mark)

    def close(self, ledger: Ledger, mark: Mark | None) -> None:
        """Write it a last time if that is worth it; when this returns, nothing is under way."""
        if self._writing is not None:
            self._writing.join()
        if mark is not None and ledger.told - self._told >= WORTH_IT:
            self._begin(ledger, mark).join()

    def _begin(self, ledger: Ledger, mark: Mark) -> threading.Thread:
        self._told = ledger.told
        chunks = written(ledger, mark, self._codec)
        self._writing = threading.Thread(
            target=self._write,
            args=(chunks, ledger.told, mark.offset),
            name="checkpoint",
            daemon=True,
        )
        self._writing.start()
        return self._writing

    def _write(self, chunks: Iterator[bytes], told: int, offset: int) -> None:
        begun = time.monotonic()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_durably(self._path, chunks)
        except OSError as e:
            self._log.warning("checkpoint_not_written", error=str(e), next_after=EVERY)
            return
        seconds = round(time.monotonic() - begun, 3)
        self._log.info(
            "checkpoint_written", trajectories=told, journal_offset=offset, seconds=seconds
        )
