"""`clawstream jobs reward`: a worker of the reward job.

It keeps no state: its position is the committed offset of its group, and rewards that are sent
again have the same ids.
"""

from __future__ import annotations

import asyncio
from functools import partial

from clawstream.runtime.process.lifecycle import run_async
from clawstream.schemas.settings import Settings
from clawstream.stream_jobs.reward.evaluate import RuleEvaluator
from clawstream.stream_jobs.reward.job import RewardJob
from clawstream.stream_jobs.worker.shell import serve


def main(settings: Settings) -> None:
    """Run a worker of the reward job until SIGTERM. Never returns; wrong reward functions exit as
    wrong settings.
    """
    run_async("reward", settings, _serve)


async def _serve(settings: Settings, stop: asyncio.Event) -> None:
    evaluator = RuleEvaluator(settings)  # first: an unknown name needs no Kafka to be reported
    settings = with_short_batches(settings, evaluator)
    await serve(settings, stop, group="reward", make=partial(RewardJob, evaluator=evaluator))


def with_short_batches(settings: Settings, evaluator: RuleEvaluator) -> Settings:
    """Limit a batch to what the child processes take at once, if there is any work for them.

    A position is committed after each batch, so a restart repeats at most one.
    """
    jobs = settings.jobs
    runs = {*jobs.reward_functions, *jobs.quality_functions}
    if not any(map(evaluator.uses_child_processes, runs)):
        return settings
    records = min(jobs.batch_records, settings.functions.calls_at_once)
    short = jobs.model_copy(update={"batch_records": records})
    return settings.model_copy(update={"jobs": short})
