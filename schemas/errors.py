"""Errors of the contract. The docstring says what happened and what to do."""

from __future__ import annotations


class ForeseenError(Exception):
    """Root of every error that the code foresees, in all packages: its message alone says what happened and what to do.

    A command or a process ends with this message in one line and the exit code of the class (`runtime.exit_codes`). Every
    other exception is a bug: it ends with a traceback.
    """


class SchemaError(ForeseenError):
    """Root of all errors of `schemas`."""


class Undecodable(SchemaError):
    """The bytes are no record: wrong framing, or a body that does not fit its schema. Dead-letter it."""


class UnknownSchema(SchemaError):
    """The fingerprint is neither shipped nor announced on the schemas topic. Refresh once, then dead-letter it."""

    def __init__(self, fingerprint: str) -> None:
        super().__init__(
            f"no schema with fingerprint {fingerprint}: neither shipped nor announced on the schemas topic"
        )
        self.fingerprint = fingerprint


class NotARecord(SchemaError):
    """What is to become a record has a field too many, too few or of a wrong type. The message names the field."""


class InvalidId(SchemaError):
    """An id has a character or a length that it must not have. The message names the field."""


class SettingsError(SchemaError):
    """A setting is unknown or has a wrong value. The message names its path."""
