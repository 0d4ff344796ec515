"""Each advantage estimator against a plain loop over nested lists, written from the formula."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.batch_views import Member, Step, members, view_of

from clawstream.schemas.algorithms import AlgorithmSettings, KlEstimator
from clawstream.trainer.algorithms.advantages.distillation import distillation
from clawstream.trainer.algorithms.advantages.dr_grpo import dr_grpo
from clawstream.trainer.algorithms.advantages.gae import (
    gae,
    gae_returns,
    gae_steps,
    gae_steps_returns,
)
from clawstream.trainer.algorithms.advantages.grpo import grpo
from clawstream.trainer.algorithms.advantages.grpo_process import grpo_process
from clawstream.trainer.algorithms.advantages.maxrl import maxrl
from clawstream.trainer.algorithms.advantages.reinforce_pp import reinforce_pp
from clawstream.trainer.algorithms.advantages.reinforce_pp_baseline import reinforce_pp_baseline
from clawstream.trainer.algorithms.advantages.rloo import rloo
from clawstream.trainer.algorithms.advantages.supervised import ones, reward_weights
from clawstream.trainer.algorithms.batch import BatchView, Floats
from clawstream.trainer.algorithms.returns import placed_rewards

Estimator = Callable[[BatchView, AlgorithmSettings], Floats]
CLOSE = {"rtol": 1e-5, "atol": 1e-9}


def per_token(data: list[Member], values: list[float]) -> list[float]:
    """Repeat a value of each member for each of its tokens."""
    return [
        value
        for member, value in zip(data, values, strict=True)
        for sequence in member.sequences
        for step in sequence
        for _ in step.tokens
    ]


def rewards_of(data: list[Member], group: int) -> list[float]:
    return [member.reward for member in data if member.group == group]


def grpo_formula(data: list[Member], offset: float) -> list[float]:
    found = []
    for member in data:
        rewards = rewards_of(data, member.group)
        mean = sum(rewards) / len(rewards)
        std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
        found.append((member.reward - mean) / (std + offset))
    return found


def dr_grpo_formula(data: list[Member], offset: float) -> list[float]:
    return [m.reward - float(np.mean(rewards_of(data, m.group))) for m in data]


def rloo_formula(data: list[Member], offset: float) -> list[float]:
    """n / (n - 1) * (r - mean), the form of verl and TRL."""
    found = []
    for member in data:
        rewards = np.array(rewards_of(data, member.group))
        n = len(rewards)
        found.append(float(member.reward * n / (n - 1) - rewards.mean() * n / (n - 1)))
    return found


def maxrl_formula(data: list[Member], offset: float) -> list[float]:
    found = []
    for member in data:
        mean = float(np.mean(rewards_of(data, member.group)))
        found.append((member.reward - mean) / (mean + offset) if mean > 0 else 0.0)
    return found


@pytest.mark.parametrize(
    ("estimator", "formula"),
    [
        (grpo, grpo_formula),
        (dr_grpo, dr_grpo_formula),
        (rloo, rloo_formula),
        (maxrl, maxrl_formula),
    ],
)
@given(data=members(), offset=st.floats(1e-3, 1))
def test_outcome_advantages(
    estimator: Estimator,
    formula: Callable[[list[Member], float], list[float]],
    data: list[Member],
    offset: float,
) -> None:
    got = estimator(view_of(data), AlgorithmSettings(std_offset=offset))
    np.testing.assert_allclose(got, per_token(data, formula(data, offset)), rtol=1e-5, atol=1e-6)


def chain_rewards(sequence: tuple[Step, ...], outcome: float) -> list[float]:
    """Return the reward of each token: those of steps at their ends, the outcome at the end."""
    found: list[float] = []
    for step in sequence:
        found += [0.0] * len(step.tokens)
        found[-1] += step.reward or 0.0
    found[-1] += outcome
    return found


def tokens_of(sequence: tuple[Step, ...]) -> list[tuple[float, float, float, float]]:
    return [token for step in sequence for token in step.tokens]


def k(estimator: str, logprob: float, ref: float) -> float:
    d = logprob - ref
    return {"k1": d, "k2": 0.5 * d * d, "k3": math.exp(-d) - 1 + d}[estimator]


def whiten(values: list[float], offset: float) -> list[float]:
    mean = sum(values) / len(values)
    std = math.sqrt(sum((v - mean) ** 2 for v in values) / len(values))
    return [(v - mean) / (std + offset) for v in values]


@given(
    data=members(),
    gamma=st.floats(0.5, 1),
    kl_coef=st.sampled_from([0.0, 0.1]),
    estimator=st.sampled_from(["k1", "k2", "k3"]),
)
def test_reinforce_pp_is_the_whitened_return_with_the_penalty_of_each_token(
    data: list[Member], gamma: float, kl_coef: float, estimator: KlEstimator
) -> None:
    returns = []
    for member in data:
        for sequence in member.sequences:
            rewards = [
                reward - kl_coef * k(estimator, sampled, ref)
                for reward, (sampled, ref, _, _) in zip(
                    chain_rewards(sequence, member.reward), tokens_of(sequence), strict=True
                )
            ]
            returns += [
                sum(r * gamma**j for j, r in enumerate(rewards[i:])) for i in range(len(rewards))
            ]
    assume(np.std(returns) > 1e-3)
    s = AlgorithmSettings(gamma=gamma, kl_coef=kl_coef, kl_estimator=estimator, kl_in="reward")
    got = reinforce_pp(view_of(data), s)
    np.testing.assert_allclose(got, whiten(returns, s.std_offset), rtol=1e-5, atol=1e-7)


@given(data=members())
def test_reinforce_pp_baseline_whitens_over_the_tokens_of_the_batch(data: list[Member]) -> None:
    centered = per_token(data, dr_grpo_formula(data, 0.0))
    assume(np.std(centered) > 1e-3)
    got = reinforce_pp_baseline(view_of(data), AlgorithmSettings(std_offset=1e-6))
    np.testing.assert_allclose(got, whiten(centered, 1e-6), rtol=1e-5, atol=1e-7)


@given(data=members(), kl_coef=st.floats(0.01, 0.5))
def test_a_penalty_in_the_reward_reaches_the_outcome(data: list[Member], kl_coef: float) -> None:
    penalized = [
        replace(
            m,
            reward=m.reward
            - kl_coef * sum(k("k1", s, r) for q in m.sequences for s, r, _, _ in tokens_of(q)),
        )
        for m in data
    ]
    s = AlgorithmSettings(kl_coef=kl_coef, kl_estimator="k1", kl_in="reward")
    np.testing.assert_allclose(
        dr_grpo(view_of(data), s),
        dr_grpo(view_of(penalized), AlgorithmSettings()),
        rtol=1e-5,
        atol=1e-9,
    )


@given(data=members())
def test_grpo_process_sums_the_standardized_rewards_from_each_step_on(data: list[Member]) -> None:
    by_group: dict[int, list[float]] = {}
    for member in data:
        for sequence in member.sequences:
            rewarded = [s.reward for s in sequence[:-1] if s.reward is not None]
            last = (sequence[-1].reward or 0.0) + member.reward
            by_group.setdefault(member.group, []).extend([*rewarded, last])
    expected = []
    for member in data:
        pool = np.array(by_group[member.group])
        std = pool.std(ddof=1)
        for sequence in member.sequences:
            for i, step in enumerate(sequence):
                future = [s.reward for s in sequence[i:-1] if s.reward is not None]
                future.append((sequence[-1].reward or 0.0) + member.reward)
                total = sum((r - pool.mean()) / (std + 1e-4) for r in future if std > 0)
                expected += [total] * len(step.tokens)
    got = grpo_process(view_of(data), AlgorithmSettings(std_offset=1e-4))
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@given(data=members(), gamma=st.floats(0.8, 1), lam=st.floats(0, 1))
def test_gae_is_the_double_sum_of_the_paper(data: list[Member], gamma: float, lam: float) -> None:
    expected = []
    for member in data:
        for sequence in member.sequences:
            rewards = chain_rewards(sequence, member.reward)
            values = [token[3] for token in tokens_of(sequence)] + [0.0]
            n = len(rewards)
            deltas = [rewards[t] + gamma * values[t + 1] - values[t] for t in range(n)]
            expected += [
                sum((gamma * lam) ** (j - t) * deltas[j] for j in range(t, n)) for t in range(n)
            ]
    assume(np.std(expected) > 1e-3)
    got = gae(view_of(data), AlgorithmSettings(gamma=gamma, gae_lambda=lam))
    np.testing.assert_allclose(got, whiten(expected, 1e-8), rtol=1e-5, atol=1e-7)


def test_after_a_reply_that_was_cut_comes_the_value_before_its_last_token() -> None:
    """It would have gone on. Without that value the last tokens look bad for no reason."""
    tokens = tuple((-1.0, -1.0, -1.0, value) for value in (0.5, 0.25, 0.75))
    steps = (Step(None, tokens[:1]), Step(None, tokens[1:]))
    ended, cut = (view_of([Member(0, 0.0, (steps,), cut=cut)]) for cut in (False, True))
    s = AlgorithmSettings(gamma=0.5)
    assert gae_returns(ended, s).tolist() == [0.0, 0.0, 0.0]
    assert gae_returns(cut, s).tolist() == [0.75 / 8, 0.75 / 4, 0.75 / 2]
    assert gae_steps_returns(ended, s).tolist() == [0.0, 0.0, 0.0]
    assert gae_steps_returns(cut, s).tolist() == [0.75 / 4, 0.75 / 2, 0.75 / 2]


@given(data=members(), gamma=st.floats(0.8, 1), lam=st.floats(0, 1))
def test_step_level_gae_has_one_action_a_step(data: list[Member], gamma: float, lam: float) -> None:
    expected = []
    for member in data:
        for sequence in member.sequences:
            rewards = [step.reward or 0.0 for step in sequence]
            rewards[-1] += member.reward
            values = [step.tokens[0][3] for step in sequence] + [0.0]
            n = len(rewards)
            deltas = [rewards[t] + gamma * values[t + 1] - values[t] for t in range(n)]
            for t, step in enumerate(sequence):
                estimate = sum((gamma * lam) ** (j - t) * deltas[j] for j in range(t, n))
                expected += [estimate] * len(step.tokens)
    assume(np.std(expected) > 1e-3)
    got = gae_steps(view_of(data), AlgorithmSettings(gamma=gamma, gae_lambda=lam))
    np.testing.assert_allclose(got, whiten(expected, 1e-8), rtol=1e-5, atol=1e-7)


@given(data=members())
def test_distillation_and_supervised_weights(data: list[Member]) -> None:
    view, s = view_of(data), AlgorithmSettings()
    tokens = [t for m in data for q in m.sequences for t in tokens_of(q)]
    np.testing.assert_allclose(
        distillation(view, s), [teacher - sampled for sampled, _, teacher, _ in tokens], **CLOSE
    )
    np.testing.assert_array_equal(ones(view, s), np.ones(len(tokens)))
    np.testing.assert_allclose(
        reward_weights(view, s), per_token(data, [m.reward for m in data]), **CLOSE
    )


@pytest.mark.parametrize(
    ("estimator", "s"),
    [
        (gae, AlgorithmSettings()),
        (gae_steps, AlgorithmSettings()),
        (distillation, AlgorithmSettings()),
        (grpo, AlgorithmSettings(kl_coef=0.1, kl_in="reward")),
    ],
)
def test_a_missing_column_is_an_error(estimator: Estimator, s: AlgorithmSettings) -> None:
    step = Step(None, ((-1.0, -1.0, -1.0, 0.0),))
    view = view_of([Member(0, 1.0, ((step,),)), Member(0, 0.0, ((step,),))])
    bare = replace(view, ref_logprobs=None, teacher_logprobs=None, values=None)
    with pytest.raises(ValueError, match="batch has no"):
        estimator(bare, s)


def test_the_reward_of_a_step_without_tokens_goes_to_the_step_before_it() -> None:
    token = (-1.0, -1.0, -1.0, 0.0)
    steps = (Step(8.0, ()), Step(None, (token, token)), Step(4.0, ()), Step(2.0, (token,)))
    view = view_of([Member(0, 16.0, (steps,)), Member(0, float("nan"), ((Step(1.0, (token,)),),))])
    np.testing.assert_array_equal(placed_rewards(view), [np.nan, 4.0, 18.0, 1.0])
