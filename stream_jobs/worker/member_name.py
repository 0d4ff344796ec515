"""The name of a worker in its consumer group."""

from __future__ import annotations

import os
import socket

from clawstream.schemas.settings import JobsSettings


def worker_name(jobs: JobsSettings) -> str:
    """Return the worker's name in its consumer group. Live workers must differ; otherwise Kafka
    fences them.
    """
    return jobs.worker_id if jobs.worker_id is not None else f"{socket.gethostname()}-{os.getpid()}"
