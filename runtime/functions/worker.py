"""The child process in which users' functions run: `python -P -m runtime.functions.worker FD
FOLDER...`.

It answers requests on the socket FD, one at a time, as `runtime.functions.pool` sends them. It is
killed when a function takes too long, and by the kernel when its parent dies. What functions print
goes to standard error.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from schemas.rule_spec import REASON_CHARS, reason_text
from schemas.user_function import FunctionNotFound, load_function

DEPTH_MAX = 4
"""Lists in an answer: a list of scores has 2 levels."""


def to_builtins(answer: Any, depth: int = 0) -> Any:
    """Convert a function's answer to numbers, texts, lists and mappings for the parent process.

    Raises:
        TypeError: The answer has another type.
    """
    if answer is None or isinstance(answer, bool):
        return answer
    if isinstance(answer, str | bytes):
        return answer[:REASON_CHARS]
    if isinstance(answer, int | float):
        return int(answer) if isinstance(answer, int) else float(answer)
    if depth < DEPTH_MAX and isinstance(answer, Mapping):
        return {
            to_builtins(key, DEPTH_MAX): to_builtins(value, depth + 1)
            for key, value in answer.items()
        }
    if depth < DEPTH_MAX and isinstance(answer, Iterable):
        return [to_builtins(value, depth + 1) for value in answer]
    raise TypeError(f"a function answers with numbers, not {type(answer).__name__}")


def answer_to(
    request: tuple[Any, ...], folders: Sequence[Path], loaded: dict[str, Callable[..., Any]]
) -> tuple[str, Any]:
    """Answer `("load", target)` or `("call", target, argument)`.

    A MemoryError is not caught: it ends the process.

    Returns: `("answer", value)`; `("missing", why)` for a function that does not exist; `("raised",
    reason)` for a function that fails.
    """
    target = request[1]
    try:
        if target not in loaded:
            loaded[target] = load_function(target, folders)
        return "answer", to_builtins(loaded[target](request[2])) if request[0] == "call" else None
    except FunctionNotFound as e:
        return "missing", str(e)
    except MemoryError:
        raise
    except SystemExit as e:
        return "raised", f"SystemExit: {e}"
    except Exception as e:  # noqa: BLE001 - a user's function: what it raises is the reason, on the record
        return "raised", reason_text(e)


def main(words: Sequence[str]) -> None:
    """Answer until the parent closes the socket."""
    folders, loaded = [Path(word) for word in words[1:]], dict[str, Callable[..., Any]]()
    with Connection(int(words[0])) as parent:
        while True:
            try:
                request = parent.recv()
            except EOFError:
                return
            parent.send(answer_to(request, folders, loaded))


if __name__ == "__main__":
    main(sys.argv[1:])
