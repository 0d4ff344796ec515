"""The exit codes of all processes and commands.

docs/operating.md shows the same table; a test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass

from clawstream.runtime.atomic_file import is_full
from clawstream.runtime.errors import InUse, StoreAway
from clawstream.runtime.kafka.errors import Denied, Fenced, SourceTruncated, Unavailable
from clawstream.schemas.errors import ForeseenError, InvalidId, SettingsError

EXIT_FAILED = 1
EXIT_SETTINGS = 2
EXIT_KAFKA = 69
EXIT_CRASH = 70
EXIT_IN_USE = 75
EXIT_FENCED = 78
EXIT_SOURCE = 79


@dataclass(frozen=True, slots=True)
class Meaning:
    """An exit code and its explanation.

    restarted: Whether the supervisor restarts a process that ends with it.
    """

    code: int
    name: str
    meaning: str
    action: str
    restarted: bool


MEANINGS = (
    Meaning(0, "done", "the work is done, or the process was asked to stop", "nothing", False),
    Meaning(
        EXIT_FAILED,
        "failed",
        "a command or a process could not do its work",
        "the message says what to do",
        True,
    ),
    Meaning(
        EXIT_SETTINGS,
        "wrong settings",
        "wrong settings or arguments, [topics](#topics) with another configuration, or a login or "
        "permission that Kafka refuses",
        "the message names the setting, or topic, setting and command",
        False,
    ),
    Meaning(
        EXIT_KAFKA,
        "no answer",
        "Kafka does not answer or acknowledge in time, or the lake's object store does not answer",
        "start Kafka, or correct `kafka.bootstrap_servers` or `lake.storage_options`",
        True,
    ),
    Meaning(
        EXIT_CRASH,
        "crashed",
        "an unforeseen error, with a traceback",
        "report it; no data is lost",
        True,
    ),
    Meaning(
        EXIT_IN_USE,
        "in use",
        "another process has the port, the data directory or the broker",
        "the message names it and the setting: stop that process, or choose another",
        True,
    ),
    Meaning(
        EXIT_FENCED,
        "fenced",
        "a newer instance of the same run took over, or lake writers of another number",
        "stop one of the two",
        False,
    ),
    Meaning(
        EXIT_SOURCE,
        "source truncated",
        "a stored position does not fit its topic, or data it needs is gone",
        "`clawstream status --positions`, and see below",
        False,
    ),
)
NO_RESTART = frozenset(m.code for m in MEANINGS if not m.restarted)
NAMES = {m.code: m.name for m in MEANINGS}


def exit_code(error: BaseException) -> int:
    """Return the exit code of an error."""
    match error:
        case SettingsError() | InvalidId() | Denied():
            return EXIT_SETTINGS
        case Fenced():
            return EXIT_FENCED
        case SourceTruncated():
            return EXIT_SOURCE
        case Unavailable() | StoreAway():
            return EXIT_KAFKA
        case InUse():
            return EXIT_IN_USE
        case _ if is_foreseen(error):
            return EXIT_FAILED
        case _:
            return EXIT_CRASH


def is_foreseen(error: BaseException) -> bool:
    """Whether the message alone says what to do, so that a traceback would only hide it."""
    return isinstance(error, ForeseenError) or _is_of_a_full_disk(error)


def message_of(error: BaseException) -> str:
    """Return what to tell about an error."""
    text = str(error) or type(error).__name__
    return f"{text}: make room" if _is_of_a_full_disk(error) else text


def _is_of_a_full_disk(error: BaseException) -> bool:
    return isinstance(error, OSError) and is_full(error)
