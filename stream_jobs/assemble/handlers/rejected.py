"""The rejection of a record."""

from __future__ import annotations


class RejectedRecord(Exception):
    """The record cannot be decoded or folded, and becomes a dead letter with this reason."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class InvalidRecord(RejectedRecord):
    """A field of the record is invalid."""

    def __init__(self, detail: str) -> None:
        super().__init__("invalid", detail)
