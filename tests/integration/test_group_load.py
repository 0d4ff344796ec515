"""A stream worker whose consumer is stopped by its group ends, and its next start reads on."""

from __future__ import annotations

import sys
from pathlib import Path

from support.jobs import RUN, Eventually, running

from clawstream.runtime.exit_codes import EXIT_FAILED
from clawstream.runtime.kafka import Cluster
from clawstream.runtime.process.config import overrides_of
from clawstream.schemas.settings import Settings

LOADING = """
from itertools import count
from aiokafka.consumer.group_coordinator import GroupCoordinator

plain, synced = GroupCoordinator._send_req, count(1)

async def answered(coordinator, request):
    # As a coordinator answers a SyncGroup while it still loads the group. No fetch takes the error.
    response = await plain(coordinator, request)
    if type(request).__name__.startswith("SyncGroup") and next(synced) == 1:
        response.error_code = 14
    return response

GroupCoordinator._send_req = answered
"""


def test_a_worker_that_meets_a_group_that_is_loading_ends_and_reads_on(
    settings: Settings, cluster: Cluster, tmp_path: Path, eventually: Eventually
) -> None:
    with running(settings, cluster, tmp_path, worker_id="0") as jobs:
        command = [sys.executable, "-c", LOADING + RUN.format("assemble")]
        loading = jobs.processes.start("loading", [*command, *overrides_of(jobs.settings)])
        assert eventually(loading.poll) == EXIT_FAILED
        assert "GroupLoadInProgress" in jobs.processes.log("loading")
        jobs.put(*jobs.conversation("k"))
        jobs.producer.flush()
        jobs.start()
        eventually(lambda: "k" in jobs.candidates())
