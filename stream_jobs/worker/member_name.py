"""The name of a worker in its consumer group."""

from __future__ import annotations

import os
import socket

from schemas.settings import JobsSettings


def worker_name(jobs: JobsSettings) -> str:
    """Under what name a worker is a member of its group. Two that live at once must differ: else Kafka fences one after the other."""
    return jobs.worker_id if jobs.worker_id is not None else f"{socket.gethostname()}-{os.getpid()}"
