"""Errors of an export."""

from __future__ import annotations

from clawstream.stream_jobs.errors import StreamJobError


class ExportError(StreamJobError):
    """An export cannot be written. The message says what to change."""
