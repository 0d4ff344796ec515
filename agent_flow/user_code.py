"""Errors of users' own code, told by the lines of their files instead of a whole stack."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from clawstream.agent_flow.errors import FlowError

MOST_FRAMES = 5
_OURS = str(Path(__file__).resolve().parent)
_LIBRARIES = tuple(
    {str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "purelib", "platlib")}
)


@contextmanager
def users_code(what: str) -> Iterator[None]:
    """Turn what a user's code raises into a FlowError with the user's own frames.

    Args:
        what: The code, as the subject of the message: `flow.py`, or `the tasks of flow x`.

    Raises:
        FlowError: The code raised something; a FlowError stays as it is.
    """
    try:
        yield
    except FlowError:
        raise
    except (Exception, SystemExit) as error:
        raise FlowError(described(what, error)) from error


def described(what: str, error: BaseException) -> str:
    """Return what a user's code raised, with file, line and text of its own frames.

    Frames of the standard library, of installed packages and of this package are omitted, except
    the last one if there is no other.
    """
    frames = traceback.extract_tb(error.__traceback__)
    shown = [frame for frame in frames if _is_users(frame.filename)] or frames[-1:]
    lines = [
        f"  {frame.filename}, line {frame.lineno}, in {frame.name}: {frame.line}"
        for frame in shown[-MOST_FRAMES:]
    ]
    if isinstance(error, SyntaxError):
        lines = [f"  {error.filename}, line {error.lineno}: {(error.text or '').strip()}"]
        reason = f"{type(error).__name__}: {error.msg}"
    else:
        reason = f"{type(error).__name__}: {error}"
    return "\n".join([f"{what} failed: {reason}", *lines, _advice(error)])


def _is_users(filename: str) -> bool:
    if filename.startswith("<"):  # <frozen importlib._bootstrap> and the like
        return False
    path = str(Path(filename).resolve())
    return not path.startswith((_OURS, *_LIBRARIES))


def _advice(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"install the module {error.name!r}, or correct the import"
    if isinstance(error, SystemExit):
        return 'keep code that ends the process below `if __name__ == "__main__":`'
    return "correct the code at the last line shown, and start again"
