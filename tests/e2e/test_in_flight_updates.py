"""Many weight updates while calls are in flight, on an engine whose KV cache is too small for them.

So calls are also preempted, and their prefix is computed again with newer weights.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
from support.engine import random_version, serving
from support.in_flight import CLIENTS, counted, reloaded_under_load, worst_of_spans

UPDATES = 50
BLOCKS = 24
"""Of the KV cache. 16 calls of up to 256 tokens would need 32 blocks of 128 tokens."""

pytestmark = pytest.mark.long


def test_each_token_is_of_the_version_in_its_span(tmp_path: Path) -> None:
    with serving(tmp_path, extra_args=("--num-gpu-blocks-override", str(BLOCKS))) as engine:
        versions = {f"run/{i}.0": random_version(engine.work, i) for i in range(UPDATES + 1)}
        replies, loads = reloaded_under_load(engine, versions, tokens_between=4 * CLIENTS)
        preempted = engine.run(counted(engine, "vllm:num_preemptions_total"))
    assert len(loads) == UPDATES and preempted > 0
    spans = [span for reply in replies for span in reply.spans]
    assert {version for version, _, _ in spans} == set(versions)
    assert sum(len(reply.spans) > 1 for reply in replies) >= len(replies) / 2
    largest = worst_of_spans(replies, versions)
    pauses = [load.pause_ms for load in loads]
    print(
        f"{UPDATES} updates, {len(replies)} calls, {len(spans)} spans, {preempted:.0f} preemptions,"
        f" |engine - model| <= {largest:.2g}, pause {statistics.median(pauses):.0f} ms (median),"
        f" {max(pauses):.0f} ms (largest)"
    )
    assert largest < 1e-3
