"""Load a user's function by `file.py:function` or `module:function`, in the same way everywhere.

Files and modules are searched in the folders of the settings: the working directory and the config
file's folder. A file is loaded by path, so its name may equal that of any package. A module is
imported; an error is raised when another module of that name would hide it. The folders are last on
`sys.path` and hide nothing.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from clawstream.schemas.errors import SchemaError

Find = Callable[..., Callable[..., Any]]
"""`file.py:function` or `module:function`, and a configuration as JSON if the target takes one, to
the function. Raises FunctionNotFound."""
_PROGRESS: ContextVar[Callable[[], None]] = ContextVar("progress", default=lambda: None)
F = TypeVar("F", bound=Callable[..., Any])


class FunctionNotFound(SchemaError):
    """A user's function does not exist, or its file cannot be loaded. The message says why."""


def batched(size: int) -> Callable[[F], F]:
    """Return a decorator: the function takes a list of trajectories and returns as many results.

    Args:
        size: Of the largest list.

    Raises:
        ValueError: The size is not positive.
    """
    if size < 1:
        raise ValueError(f"batched({size}): the size is at least 1")

    def mark(function: F) -> F:
        function.batch_size = size  # type: ignore[attr-defined]
        return function

    return mark


def batch_size_of(function: Callable[..., Any]) -> int | None:
    """Return the batch size of a function, set by `batched`; None if it takes one trajectory."""
    return getattr(function, "batch_size", None)


def progress() -> None:
    """Say that work on the calls of an async function goes on: their time limits begin again.

    For a function that makes many requests for one trajectory, each within a time of its own.
    """
    _PROGRESS.get()()


@contextmanager
def told_progress(tell: Callable[[], None]) -> Iterator[None]:
    """Let `progress` call `tell`, in this context and in tasks that it creates."""
    token = _PROGRESS.set(tell)
    try:
        yield
    finally:
        _PROGRESS.reset(token)


def load_function(target: str, folders: Sequence[Path]) -> Callable[..., Any]:
    """Load a user's function in this process.

    Args:
        target: `file.py:function` or `module:function`.
        folders: where files and modules are looked up, the first one first.

    Raises:
        FunctionNotFound: there is none, or its file raises.
    """
    source, _, name = target.rpartition(":")
    for folder in folders:
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
    module = (
        _of_file(_path_of(source, folders))
        if source.endswith(".py")
        else _of_module(source, folders)
    )
    if not hasattr(module, name):
        raise FunctionNotFound(f"{module.__file__ or source} has no {name}")
    function = getattr(module, name)
    if not callable(function):
        raise FunctionNotFound(f"{name} of {module.__file__ or source} is not callable")
    return function  # type: ignore[no-any-return]


def _path_of(source: str, folders: Sequence[Path]) -> Path:
    for folder in folders:
        if (path := folder / source).is_file():  # an absolute one is itself, whatever the folder
            return path.resolve()
    raise FunctionNotFound(f"there is no file {source} in {', '.join(map(str, folders))}")


def _of_file(path: Path) -> ModuleType:
    name = f"clawstream_file_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # for what it imports beside it
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise FunctionNotFound(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except MemoryError:
        raise
    except Exception as e:  # a user's module: any error of its import is the reason
        del sys.modules[name]
        raise FunctionNotFound(_told(e)) from e
    return module


def _of_module(name: str, folders: Sequence[Path]) -> ModuleType:
    parts = name.split(".")
    places = [folder.joinpath(*parts) for folder in folders]
    files = [
        f for place in places for f in (place.with_name(f"{place.name}.py"), place / "__init__.py")
    ]
    meant = next((file for file in files if all(parts) and file.is_file()), None)
    try:
        module = importlib.import_module(name)
    except MemoryError:
        raise
    except Exception as e:  # as in `_of_file`
        if meant is None or not _is_hidden(parts[0], meant):
            raise FunctionNotFound(_told(e)) from e
        module = sys.modules[parts[0]]
    if meant is not None and (
        module.__file__ is None or Path(module.__file__).resolve() != meant.resolve()
    ):
        raise FunctionNotFound(
            f"{module.__name__} is {module.__file__ or 'built in'}, which hides {meant}: name "
            f"the file, {meant.name}:..."
        )
    return module


def _is_hidden(top: str, meant: Path) -> bool:
    """Return whether another package than that of the file was imported under the first name."""
    place = getattr(sys.modules.get(top), "__file__", None)
    return place is not None and not meant.resolve().is_relative_to(Path(place).resolve().parent)


def _told(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    where = "" if frame.filename.startswith("<") else f" ({frame.filename}, line {frame.lineno})"
    return f"{type(error).__name__}: {error}{where}"
