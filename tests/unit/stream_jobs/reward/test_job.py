"""The size of the reward job's batches, and its end."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from clawstream.runtime.topics.records import cluster_of
from clawstream.schemas.settings import JobsSettings, Settings
from clawstream.stream_jobs.reward.evaluate import RuleEvaluator
from clawstream.stream_jobs.reward.job import RewardJob
from clawstream.stream_jobs.reward.main import with_short_batches


@pytest.mark.parametrize(("spec", "records"), [("rm@1", 64), ("exact_match@1", 500)])
def test_a_batch_is_what_child_processes_take_at_once(
    monkeypatch: pytest.MonkeyPatch, spec: str, records: int
) -> None:
    monkeypatch.setattr(
        "clawstream.stream_jobs.reward.evaluate.rules_of", lambda *_: {}
    )  # loads no model
    jobs = JobsSettings.model_validate(
        {
            "reward_functions": {"run": [spec]},
            "reward_models": {"rm": {"type": "disrm", "model": "m", "url": "http://rm"}},
        }
    )
    settings = Settings(jobs=jobs)
    evaluator = RuleEvaluator(settings)
    assert with_short_batches(settings, evaluator).jobs.batch_records == records
    evaluator.close()


def test_to_close_waits_for_no_evaluation(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    job = RewardJob(settings, cluster_of(settings), RuleEvaluator(settings))
    ends, places = threading.Event(), job._evaluation._threads._max_workers
    try:
        running = [job._evaluation._threads.submit(ends.wait) for _ in range(places)]
        waiting = job._evaluation._threads.submit(ends.wait)
        job.close()
        assert waiting.cancelled() and not any(future.done() for future in running)
    finally:
        ends.set()
