"""The capacity plan's arithmetic, and its simulation against what fluid queues are known to do."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import settings as how
from hypothesis import strategies as st
from support.examples import examples

from benchmarks.capacity.lag import JOBS, Fleet, Outage, Scenario, simulate
from benchmarks.capacity.plan import Assumptions, fleet, parsed, plan, scenarios

SMALL = Fleet(
    partitions=8,
    runs=2,
    workers={"assemble": 4, "reward": 4, "lake": 4},
    rate=dict.fromkeys(JOBS, 1000.0),
    skew=0.0,
    floor_s=0.5,
    lake_floor_s=2.5,
)
CALM = Scenario(name="calm", seconds=300, mean=1500.0)


def test_below_what_the_workers_serve_nothing_waits() -> None:
    lag = simulate(SMALL, CALM, 1)
    assert (lag.max_lag, lag.drain_s, lag.delay_p99_s, lag.delay_max_s, lag.lake_delay_p99_s) == (
        0,
        0.0,
        0.5,
        0.5,
        2.5,
    )
    assert lag.steps == pytest.approx(300 * 1500, rel=0.01)


def test_a_burst_waits_and_drains_as_a_fluid_queue_does() -> None:
    """6,000/s for 60 s through 4,000/s, then 1,500/s: 120,000 wait, and go at 2,500 a second.

    The last of the burst waits 30 s.
    """
    wide = replace(SMALL, runs=8)
    lag = simulate(wide, replace(CALM, seconds=600, bursts=((100.0, 60.0, 4.0),)), 1)
    assert lag.max_lag == pytest.approx(120_000, rel=0.03)
    assert lag.drain_s == pytest.approx(120_000 / 2_500, abs=4)
    assert lag.delay_max_s == pytest.approx(30.5, abs=2)


def test_a_killed_worker_delays_its_own_partitions_only() -> None:
    lag = simulate(
        SMALL,
        replace(CALM, outages=(Outage(job="assemble", at_s=100.0, seconds=15.0, worker=0),)),
        1,
    )
    assert lag.max_lag == pytest.approx(15 * 1500 / 4, rel=0.1)
    assert lag.delay_p50_s == 0.5 and 14 <= lag.delay_max_s <= 18 and lag.lake_max_lag == 0


def test_a_killed_admission_delays_its_own_run_only() -> None:
    lag = simulate(
        SMALL, replace(CALM, outages=(Outage(job="admit", at_s=100.0, seconds=100.0, worker=1),)), 1
    )
    assert lag.max_lag == 0 and lag.delay_p50_s == 0.5 and 99 <= lag.delay_max_s <= 103


def test_what_a_broker_without_leaders_holds_back_comes_through_afterwards() -> None:
    lag = simulate(
        SMALL,
        replace(CALM, outages=(Outage(job="broker", at_s=100.0, seconds=10.0, share=0.5),)),
        1,
    )
    assert lag.max_lag == pytest.approx(10 * 1500 / 2, rel=0.1) and lag.lake_max_lag == lag.max_lag
    assert 9 <= lag.delay_max_s <= 13 and lag.drain_s is not None and lag.drain_s <= 15


def test_who_serves_less_than_comes_never_drains() -> None:
    lag = simulate(replace(SMALL, workers={**SMALL.workers, "lake": 1}), CALM, 1)
    assert (
        lag.lake_drain_s is None
        and lag.lake_max_lag == pytest.approx(500 * 300, rel=0.03)
        and lag.drain_s == 0.0
    )


@how(max_examples=examples(20))
@given(seed=st.integers(0, 1000), skew=st.floats(0, 0.3), kills=st.floats(0, 60))
def test_chance_is_the_seeds_and_more_failures_never_help(
    seed: int, skew: float, kills: float
) -> None:
    some = replace(SMALL, skew=skew)
    chance = replace(CALM, seconds=120, kills_per_hour=kills, kill_s=5.0)
    lag = simulate(some, chance, seed)
    assert simulate(some, chance, seed) == lag
    calm = simulate(some, replace(CALM, seconds=120), seed)
    assert (
        lag.steps == calm.steps
        and lag.max_lag >= calm.max_lag
        and lag.delay_p99_s >= calm.delay_p99_s
    )


def test_the_plan_is_proportional_and_serves_its_busiest_hour() -> None:
    a = parsed([])
    whole, half = plan(a), plan(parsed(["steps_per_day=5e8"]))
    assert half["lake"]["tb_per_day"] == pytest.approx(whole["lake"]["tb_per_day"] / 2, rel=0.01)
    assert (
        half["workers"]["assemble"]
        < whole["workers"]["assemble"]
        <= whole["partitions"]["workers_at_most"]
    )
    served = fleet(a)
    for job in ("assemble", "reward", "lake"):
        assert served.workers[job] * served.rate[job] > a.peak
    assert served.runs * served.rate["admit"] > a.peak
    names = [s.name for s in scenarios(a)]
    assert len(set(names)) == len(names)


def test_assumptions_are_given_by_name() -> None:
    assert parsed(["runs=1", "vcpu_hour=0.03"]) == Assumptions(runs=1, vcpu_hour=0.03)
    for wrong in ("runs", "nothing=1", "runs=many"):
        with pytest.raises(ValueError, match=r"many|name=value"):
            parsed([wrong])
