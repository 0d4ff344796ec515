"""Tokens that a run records with its versions, on a weights log in memory."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from support.trainer_runs import GROUPS, MEMBERS, MemoryWeightLog, begin, fetched, go, settings

from clawstream.schemas.tokens import unpack_logprobs
from clawstream.trainer.step import train_batch

pytestmark = pytest.mark.usefixtures("one_thread")
STEPS = GROUPS * MEMBERS


@pytest.mark.slow
def test_each_version_has_the_tokens_of_its_batches(tmp_path: Path, model_dir: Path) -> None:
    log = MemoryWeightLog()
    run = begin(settings(tmp_path, model_dir, sync_every=2, minibatches=1), log)
    go(run, 0, 3)
    assert Counter((t.version_id, t.batch_seq, t.updates) for t in log.trained) == {
        (f"r/{seq // 2 + 1}.0", seq, updates): steps
        for seq in range(4)
        for updates, steps in ((seq % 2, STEPS - GROUPS), (None, GROUPS))
    }, "a member of each group has the mean reward, so its sequence needs no pass"
    for one in log.trained:
        assert (one.logprobs is None) == (not any(unpack_logprobs(one.advantages)))
    metrics = log.published[1].metrics
    assert metrics["wait_seconds"] > 0 and "device_memory_peak" not in metrics
    first = [unpack_logprobs(t.logprobs or b"") for t in log.trained if t.batch_seq == 0]
    distances = [abs(lp + 3.0) for values in first for lp in values]
    assert metrics["logp_max_abs_diff_same_version"] == pytest.approx(max(distances), abs=1e-5)
    mean = sum(distances) / len(distances)
    assert metrics["logp_mean_abs_diff_same_version"] == pytest.approx(mean, abs=1e-5)


@pytest.mark.slow
def test_a_batch_that_is_trained_again_has_rows_of_both_versions(
    tmp_path: Path, model_dir: Path
) -> None:
    s, log = settings(tmp_path, model_dir, save_every=9, minibatches=1), MemoryWeightLog()
    lost = begin(s, log)
    go(lost, 0, 1)
    train_batch(lost, fetched(2))  # killed: nothing of batch 2 is on the log
    go(begin(s, log), 0, 0)
    assert [v.version_id for v in log.published] == ["r/0.0", "r/1.0", "r/2.0", "r/1.1"]
    assert Counter((t.version_id, t.batch_seq) for t in log.trained) == {
        ("r/1.0", 0): STEPS, ("r/2.0", 1): STEPS, ("r/1.1", 0): STEPS,
    }  # fmt: skip
    again = {t.step_id: t for t in log.trained if t.version_id == "r/1.1"}
    for one in log.trained[:STEPS]:
        other = again[one.step_id]
        assert (one.logprobs, one.advantages) == (other.logprobs, other.advantages)


@pytest.mark.slow
def test_a_share_of_trajectories_or_none_is_recorded(tmp_path: Path, model_dir: Path) -> None:
    found = []
    for share in (1.0, 0.5, 0.0):
        log = MemoryWeightLog()
        go(begin(settings(tmp_path / str(share), model_dir, record_tokens=share), log), 0, 1)
        found.append({t.step_id for t in log.trained})
    whole, half, none = found
    assert len(whole) == 2 * STEPS and half < whole and half and not none
