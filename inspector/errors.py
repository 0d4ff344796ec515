"""Errors of the inspector. The docstring says what happened; `status` is that of the page."""

from __future__ import annotations

from clawstream.schemas.errors import ForeseenError


class InspectorError(ForeseenError):
    """Root of all errors of `inspector`."""

    status = 422


class InvalidAddress(InspectorError):
    """A parameter of an address has an invalid value or name. The message names it."""


class InvalidMark(InspectorError):
    """A mark is empty or has an invalid value. The message names the field."""


class NotPermitted(InspectorError):
    """The key lacks the scope for a change. The message names the scope."""

    status = 403


class LogAbsent(InspectorError):
    """A change needs Kafka, which does not answer; nothing was written."""

    status = 503
