"""The view of trained tokens: engine and trainer side by side, of each attempt."""

from __future__ import annotations

import math
from pathlib import Path

from support.export_lake import RUN, turn
from support.small_lake import SmallLake

from clawstream.query.connection import connect
from clawstream.schemas import records
from clawstream.schemas.settings import Settings
from clawstream.schemas.tokens import pack_logprobs

NAN = math.nan


def version(name: str, parent: str | None) -> records.WeightVersion:
    sync, attempt = map(int, name.split("."))
    return records.WeightVersion(
        version_id=f"{RUN}/{name}", run_id=RUN, sync_index=sync, attempt=attempt, format="full",
        files=(), channel="train", parent_version=None if parent is None else f"{RUN}/{parent}",
        metrics={}, created_at=1,
    )  # fmt: skip


def trained(
    name: str, number: int, logprobs: list[float] | None, advantages: list[float]
) -> records.TrainedTokens:
    return records.TrainedTokens(
        run_id=RUN, trajectory_key="k", trajectory_id="k", step_id=f"k~{number}.0",
        version_id=f"{RUN}/{name}", batch_seq=0, updates=None if logprobs is None else 0,
        logprobs=None if logprobs is None else pack_logprobs(logprobs),
        advantages=pack_logprobs(advantages),
    )  # fmt: skip


def test_each_trained_token_has_both_log_probabilities_once_per_version(tmp_path: Path) -> None:
    lake = SmallLake(settings := Settings(data_dir=tmp_path))
    spans = (
        records.VersionSpan(version=f"{RUN}/0.0", start=0, end=2),
        records.VersionSpan(version=f"{RUN}/1.0", start=2, end=3),
    )
    lake.put(
        "steps", "SS",
        turn("k", 0, [1], [8, 8, 16], versions=spans),
        turn("k", 1, [1], [24], version_first=f"{RUN}/0.0", version_last=f"{RUN}/1.0"),
    )  # fmt: skip
    lake.put("weights", "WW", version("0.0", None), version("1.0", "0.0"), version("1.1", "0.0"))
    lake.put(
        "trained_tokens", "NN",
        trained("1.0", 0, [-1.5, NAN, -2.0], [1.0, NAN, 0.5]),
        trained("1.1", 0, [-1.0, NAN, -math.inf], [1.0, NAN, 0.5]),
        trained("1.1", 1, None, [0.0]),
    )  # fmt: skip
    found = connect(settings).execute(
        """SELECT version_id, surviving, step_id, token, token_id, sampled_by, engine_logprob,
            trainer_logprob, difference, ratio, advantage
        FROM trained_tokens WHERE trained_from = 'run/0.0' ORDER BY version_id, step_id, token"""
    )
    old, new = f"{RUN}/0.0", f"{RUN}/1.0"
    assert found.fetchall() == [
        (f"{RUN}/1.0", False, "k~0.0", 0, 8, old, -1.0, -1.5, 0.5, math.exp(-0.5), 1.0),
        (f"{RUN}/1.0", False, "k~0.0", 2, 16, new, -2.0, -2.0, 0.0, 1.0, 0.5),
        (f"{RUN}/1.1", True, "k~0.0", 0, 8, old, -1.0, -1.0, 0.0, 1.0, 1.0),
        (f"{RUN}/1.1", True, "k~0.0", 2, 16, new, -2.0, -math.inf, math.inf, 0.0, 0.5),
        (f"{RUN}/1.1", True, "k~1.0", 0, 24, None, -3.0, None, None, None, 0.0),
    ]
