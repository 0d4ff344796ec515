"""`clawstream jobs compare`: a worker of the comparison job.

It keeps no state: its position is the committed offset of its group, and rewards that are sent
again have the same ids.
"""

from __future__ import annotations

import asyncio
from functools import partial

from clawstream.runtime.process.lifecycle import run_async
from clawstream.schemas.errors import SettingsError
from clawstream.schemas.settings import Settings
from clawstream.stream_jobs.compare.evaluate import GroupEvaluator
from clawstream.stream_jobs.compare.job import GROUP, CompareJob
from clawstream.stream_jobs.worker.shell import serve


def main(settings: Settings) -> None:
    """Run a worker of the comparison job until SIGTERM. Never returns; wrong reward models, or
    none that compares, exit as wrong settings.
    """
    run_async(GROUP, settings, _serve)


async def _serve(settings: Settings, stop: asyncio.Event) -> None:
    if not settings.jobs.compares_groups:
        raise SettingsError(
            "setting jobs.reward_functions: name a judge with per=group, this process has nothing "
            "else to do"
        )
    evaluator = GroupEvaluator(settings)  # first: a wrong judge needs no Kafka to be reported
    await serve(settings, stop, group=GROUP, make=partial(CompareJob, evaluator=evaluator))
