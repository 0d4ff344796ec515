"""Resolve functions that settings name, built-in or user-defined, with name and version. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from clawstream.schemas.codec.text import encodable
from clawstream.schemas.errors import SchemaError, SettingsError
from clawstream.schemas.user_function import Find, FunctionNotFound

F = TypeVar("F")
EVERY_RUN = "*"
"""In settings: stands for every run that is not named."""

REASON_CHARS = 200
"""Of a reason or evidence on a record."""
REVISION_MAX = 2**63 - 1
"""Avro's long. An assessment has the sum of its rules' revisions."""


class NoAnswer(SchemaError):
    """A user's function gave no answer. The message is the reason that its record carries."""


def of_run(configured: Mapping[str, tuple[F, ...]], run_id: str) -> tuple[F, ...]:
    """Return what is configured for a run: its own, else that of `*`."""
    return configured.get(run_id, configured.get(EVERY_RUN, ()))


def is_own(spec: str) -> bool:
    """Whether a name in the settings is that of a user's own function: of a file or a module."""
    return ":" in spec


def name_in(spec: str) -> str:
    """Return the name that the records of a function carry. Nothing is looked up."""
    return spec.rpartition("@")[0].rpartition(":")[2]


@dataclass(frozen=True)  # no slots: with them a generic alias cannot make one
class NamedFunction(Generic[F]):
    """A function with its name and version."""

    name: str
    version: str
    function: F

    @property
    def revision(self) -> int:
        """The version where that is a whole number, else 0."""
        return int(self.version) if self.version.isdecimal() else 0

    def __str__(self) -> str:
        return f"{self.name}@{self.version}"


def function_of(
    spec: str, setting: str, built_in: Mapping[str, F], kind: str, find: Find
) -> NamedFunction[F]:
    """Resolve a function that a setting names.

    Args:
        spec: `name@version`, `file.py:function@version` or `module:function@version`.
        setting: the setting's name, for errors.
        built_in: the functions that need no file or module.
        kind: what a built-in function is, for errors.
        find: gives a user's own function.

    Raises:
        SettingsError: the message begins with the setting's name.
    """
    where = f"setting {setting}: {spec!r}"
    target, sep, version = spec.rpartition("@")
    if not sep or not target or not version:
        raise SettingsError(
            f"{where}: write name@version, file.py:function@version or module:function@version"
        )
    if version.isdecimal() and (
        len(version) > len(str(REVISION_MAX)) or int(version) > REVISION_MAX
    ):
        raise SettingsError(f"{where}: a version that is a number is at most {REVISION_MAX}")
    name = name_in(spec)
    if not is_own(target):
        if name not in built_in:
            raise SettingsError(
                f"{where}: no built-in {kind} {name!r}; there are {', '.join(sorted(built_in))}"
            )
        return NamedFunction(name, version, built_in[name])
    try:
        return NamedFunction(name, version, find(target))  # type: ignore[arg-type]
    except FunctionNotFound as e:
        raise SettingsError(f"{where}: {e}; see docs/reward-functions.md") from e


def reason_text(reason: Exception | str) -> str:
    """Return a user function's error or message as text for a record. Never raises."""
    if isinstance(reason, NoAnswer):
        reason = str(reason)
    if isinstance(reason, Exception):
        kind = type(reason).__name__
        try:
            reason = f"{kind}: {reason}"
        except Exception as e:  # noqa: BLE001 - a __str__ that fails: the kind is all there is to say
            reason = f"{kind}: its text can't be had, {type(e).__name__}"
    return encodable(reason, REASON_CHARS)
