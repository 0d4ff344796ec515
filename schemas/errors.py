"""Errors of the contract. The docstring says what happened and what to do."""

from __future__ import annotations


class ForeseenError(Exception):
    """Root of all expected errors of all packages; the message says what happened and what to do.

    A command or process prints the message and exits with the code of the class
    (`clawstream.runtime.exit_codes`). Every other exception is a bug and ends with a traceback.
    """


class SchemaError(ForeseenError):
    """Root of all errors of `schemas`."""


class Undecodable(SchemaError):
    """The value has wrong framing or a body that does not fit its schema. Dead-letter it."""


class UnknownSchema(SchemaError):
    """The fingerprint is neither shipped nor announced.

    Refresh once, then dead-letter the record.
    """

    def __init__(self, fingerprint: str) -> None:
        super().__init__(
            f"no schema with fingerprint {fingerprint}: neither shipped nor announced on the "
            "schemas topic"
        )
        self.fingerprint = fingerprint


class InvalidId(SchemaError):
    """An id has a character or a length that it must not have. The message names the field."""


class SettingsError(SchemaError):
    """A setting is unknown or has a wrong value. The message names its path."""
