"""One update against plain Python arithmetic, and the pure folds around it."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import get_cosine_schedule_with_warmup

from clawstream.demo.model import make_random_model
from clawstream.schemas.errors import SettingsError
from clawstream.schemas.settings import TrainerSettings
from clawstream.trainer.algorithms.advantages.grpo import standardized
from clawstream.trainer.algorithms.registry import load
from clawstream.trainer.data.micro_batch import collate
from clawstream.trainer.data.sequences import Tokens, TrainingSequence, tokens_by_version
from clawstream.trainer.learning_rate import learning_rate
from clawstream.trainer.metrics.statistics import StepStats, TokenStats, staleness
from clawstream.trainer.model.files import TensorDtypes, load_masters, save_rounded
from clawstream.trainer.model.measurement import FirstPass, FirstPasses
from clawstream.trainer.model.policy import Policy
from clawstream.trainer.model.scores import Scores
from clawstream.trainer.model.update import update
from clawstream.trainer.parallel.processes import ONE

BOUND = 2.0
CISPO = load("cispo", {"ratio_max": BOUND}, ())
pytestmark = pytest.mark.usefixtures("one_thread")


def settings(**more: object) -> TrainerSettings:
    return TrainerSettings.model_validate({"device": "cpu", "lr": 1e-3, "minibatches": 1, **more})


def sequence(
    ids: tuple[int, ...], mask: str, logprob: float, advantage: float, version: str = "r/3.0"
) -> TrainingSequence:
    on = np.array([c == "1" for c in mask])
    tokens = Tokens(
        np.array(ids, np.int32),
        on,
        np.where(on, logprob, 0.0).astype(np.float32),
        np.full(len(ids), math.nan, np.float32),
        np.full(len(ids), version, object),
        np.zeros(len(ids), np.int32),
    )
    return TrainingSequence("t", tokens, np.full(int(on.sum()), advantage, np.float32))


def with_advantage(r: TrainingSequence, advantage: float) -> TrainingSequence:
    return replace(r, advantages=np.full(r.trained_tokens, advantage, np.float32))


def advantage_of(r: TrainingSequence) -> float:
    assert r.advantages is not None
    return float(r.advantages[0])


def logprobs(policy: Policy, sequences: Sequence[TrainingSequence]) -> torch.Tensor:
    batch = collate(sequences, policy.settings.temperature, policy.device)
    return policy.logprobs(batch)


ROWS = (
    sequence((2, 9, 10, 11, 12), "00111", -3.0, 1.0),
    sequence((2, 9, 20), "001", -9.0, -0.5, "r/2.0"),
    sequence((2, 14, 15, 16), "0101", -2.5, 0.25, "other/2.0"),
)


def measured(step: StepStats) -> TokenStats:
    assert step.measured is not None
    return step.measured


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=12), st.floats(0, 1))
def test_grpo_against_a_plain_loop(rewards: list[float], offset: float) -> None:
    mean = sum(rewards) / len(rewards)
    variance = 0.0
    for r in rewards:
        variance += (r - mean) * (r - mean)
    std = math.sqrt(variance / (len(rewards) - 1))
    got = standardized(rewards, offset)
    if max(rewards) == min(rewards):
        assert got == [0.0] * len(rewards)
    elif std > 1e-6:
        assert got == pytest.approx(
            [(r - mean) / (std + offset) for r in rewards], rel=1e-6, abs=1e-6
        )
        assert sum(got) == pytest.approx(0.0, abs=1e-5)


def reference_logprobs(policy: Policy, r: TrainingSequence, temperature: float) -> dict[int, float]:
    """Log-probability of each trained token: this sequence alone, no padding, plain arithmetic."""
    with torch.no_grad():
        logits = policy.model(torch.tensor([r.tokens.ids.tolist()])).logits[0].tolist()
    out = {}
    for i, on in enumerate(r.tokens.mask):
        if on:
            scores = [x / temperature for x in logits[i - 1]]
            out[i] = scores[r.tokens.ids[i]] - math.log(sum(math.exp(x) for x in scores))
    return out


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_of_padded_rows_equal_each_row_alone(model_dir: Path, temperature: float) -> None:
    policy = Policy(model_dir, settings(temperature=temperature))
    expected = [lp for r in ROWS for lp in reference_logprobs(policy, r, temperature).values()]
    assert logprobs(policy, ROWS).tolist() == pytest.approx(expected, abs=1e-5)


def test_logprobs_are_those_of_softmax_at_the_temperature_of_each_token(model_dir: Path) -> None:
    """In one batch: 0.7, 0.3, and the one of the settings where a step did not say its own."""
    policy = Policy(model_dir, settings(temperature=2.0))
    first, *others = ROWS
    ids = first.tokens.ids.tolist()
    trained = np.flatnonzero(first.tokens.mask).tolist()
    assert len(trained) > 2
    at = {trained[0]: 0.7, trained[1]: 0.3}
    own = np.array([at.get(i, math.nan) for i in range(len(ids))], np.float32)
    mixed = replace(first, tokens=first.tokens._replace(temperatures=own))
    with torch.no_grad():
        logits = policy.model(torch.tensor([ids])).logits[0]
    expected = [
        torch.log(torch.softmax(logits[i - 1] / at.get(i, 2.0), -1))[ids[i]].item() for i in trained
    ]
    expected += [lp for r in others for lp in reference_logprobs(policy, r, 2.0).values()]
    assert logprobs(policy, [mixed, *others]).tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("micro_batch_tokens", [1, 8, 16384])
def test_an_update_reports_what_plain_loops_compute(
    model_dir: Path, micro_batch_tokens: int
) -> None:
    policy = Policy(model_dir, settings(micro_batch_tokens=micro_batch_tokens))
    total, tokens, truncated, diffs, same, up = 0.0, 0, 0, [], [], list[bool]()
    for r in ROWS:
        for i, lp in reference_logprobs(policy, r, 1.0).items():
            ratio = math.exp(lp - r.tokens.logprobs[i])
            total += -min(ratio, BOUND) * advantage_of(r) * lp
            tokens += 1
            truncated += ratio > BOUND
            up += [ratio > BOUND] if advantage_of(r) > 0 else []
            diffs.append(abs(lp - r.tokens.logprobs[i]))
            same += diffs[-1:] if r.tokens.versions[0] == "r/3.0" else []
    assert 0 < truncated < tokens
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    (step,) = update(policy, ROWS, 0, CISPO, 1e-3, "r/3.0").steps
    assert step.loss == pytest.approx(total / tokens, rel=1e-4)
    got = measured(step)
    assert (step.tokens, got.tokens, got.clipped) == (tokens, tokens, truncated)
    assert got.clipped_positive == (sum(up), len(up)) and got.clipped_negative == (
        truncated - sum(up), tokens - len(up),
    )  # fmt: skip
    assert step.sequence_tokens == sum(len(r.tokens.ids) for r in ROWS) == 12
    assert step.computed_tokens == {1: 12, 8: 10, 16384: 9}[micro_batch_tokens]
    assert got.logp_diff == pytest.approx(max(diffs), abs=1e-4)
    assert got.same_version == pytest.approx((len(same), sum(same), max(same)), abs=1e-4)
    assert any(not torch.equal(before[name], p) for name, p in policy.model.named_parameters())


def test_micro_batches_do_not_change_the_gradient(model_dir: Path) -> None:
    norms = [
        update(Policy(model_dir, settings(micro_batch_tokens=n)), ROWS, 0, CISPO, 1e-3, None)
        .steps[0]
        .grad_norm
        for n in (1, 16384)
    ]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_the_update_raises_the_probability_of_what_was_good(model_dir: Path) -> None:
    policy = Policy(model_dir, settings())
    good, bad = (
        sequence((2, 9, 10, 11), "0011", -3.5, 1.0),
        sequence((2, 9, 20, 21), "0011", -3.5, -1.0),
    )
    before = logprobs(policy, [good, bad]).detach()
    update(policy, [good, bad], 0, CISPO, 1e-3, None)
    change = logprobs(policy, [good, bad]).detach() - before
    assert bool((change[:2] > 0).all()) and bool((change[2:] < 0).all())


@pytest.mark.slow
def test_a_seeded_run_learns_to_say_the_rewarded_token_from_samples_that_are_one_version_old(
    model_dir: Path,
) -> None:
    policy, good, prompt = Policy(model_dir, settings(lr=2e-3, minibatches=2)), 17, (2, 9, 10)
    generator = torch.Generator().manual_seed(0)

    def probabilities() -> torch.Tensor:
        with torch.no_grad():
            return torch.softmax(policy.model(torch.tensor([prompt])).logits[0, -1], -1)

    before, sampler = probabilities()[good].item(), probabilities()
    for version in range(25):
        sequences = []
        for _ in range(4):
            tokens = torch.multinomial(sampler, 16, replacement=True, generator=generator).tolist()
            advantages = standardized([float(t == good) for t in tokens], 0.3)
            sequences += [
                sequence((*prompt, t), "0001", math.log(sampler[t].item()), a)
                for t, a in zip(tokens, advantages, strict=True)
            ]
        sampler = probabilities()
        update(policy, sequences, version, CISPO, 2e-3, None)
    assert before < 0.2
    assert probabilities()[good].item() > 0.9


def test_differences_are_measured_before_the_first_update_only(model_dir: Path) -> None:
    policy = Policy(model_dir, settings(minibatches=2, epochs=2))
    stats = update(policy, ROWS, 0, CISPO, 1e-3, "r/3.0")
    assert len(stats.steps) == 4
    first, *others = [measured(step) for step in stats.steps]
    assert first.logp_diff is not None and first.same_version is not None
    assert all(s.logp_diff is None and s.same_version is None for s in others)
    policy = Policy(model_dir, settings())
    alone = measured(update(policy, ROWS, 0, CISPO, 1e-3, "r/99.0").steps[0])
    assert alone.logp_diff is not None and alone.same_version is None, (
        "no token of the version: absent"
    )


def seen_by(policy: Policy, sequences: Sequence[TrainingSequence]) -> list[FirstPass | None]:
    """Train a batch; return the first pass of each sequence."""
    passes = FirstPasses(sequences, 3)
    update(policy, sequences, 0, CISPO, 1e-3, None, passes)
    trained, found = zip(*passes.gathered(ONE), strict=True)
    assert list(trained) == list(sequences)
    return list(found)


@pytest.mark.parametrize("more", [{}, {"epochs": 2}, {"recompute_old_logprobs": True}])
def test_the_first_pass_of_each_sequence_is_recorded(model_dir: Path, more: dict[str, int]) -> None:
    idle = with_advantage(sequence((2, 9, 30), "001", -3.0, 1.0), 0.0)
    policy = Policy(model_dir, settings(minibatches=2, **more))
    before = [list(reference_logprobs(policy, r, 1.0).values()) for r in ROWS]
    *found, none = seen_by(policy, [*ROWS, idle])
    assert none is None and {p.updates for p in found if p is not None} == {3, 4}
    for values, expected in zip(found, before, strict=True):
        assert values is not None
        near = values.logprobs.tolist() == pytest.approx(expected, abs=1e-5)
        assert near == (values.updates == 3), "the second minibatch sees changed weights"


def test_a_step_that_is_not_finite_is_skipped_and_the_next_one_is_taken(model_dir: Path) -> None:
    """The broken sequence is alone in its minibatch: the other minibatches train as if the batch
    did not have it.
    """
    policy, expected = (Policy(model_dir, settings(minibatches=2)) for _ in range(2))
    good, broken = (
        sequence((2, 9, 10, 11), "0011", -3.0, 1.0),
        sequence((2, 9, 10), "001", math.nan, 1.0),
    )
    passes = FirstPasses([good, broken], 0)
    stats = update(policy, [good, broken], 7, CISPO, 1e-3, "r/3.0", passes)
    assert [step.skipped is None for step in stats.steps] == [False, True]
    ((trained, first),) = passes.gathered(ONE)
    assert trained is good and first is not None and first.updates == 0
    skipped, taken = sorted(stats.steps, key=lambda step: step.skipped is None)
    assert skipped.skipped == "loss nan, gradient norm nan"
    assert (skipped.loss, skipped.grad_norm) == (None, None)
    assert taken.skipped is None and stats.updates
    update(expected, [good], 7, CISPO, 1e-3, None)
    assert same_state(policy, expected)
    passes = FirstPasses([broken], 0)
    assert not update(policy, [broken], 8, CISPO, 1e-3, None, passes).updates
    assert passes.gathered(ONE) == [], "a skipped step trains nothing"
    assert same_state(policy, expected)


def same_state(a: Policy, b: Policy) -> bool:
    """Whether weights and optimiser are equal bit for bit."""
    states = [[t for s in p.optimizer.state.values() for t in s.values()] for p in (a, b)]
    weights = [list(p.model.parameters()) for p in (a, b)]
    return all(
        torch.equal(x, y)
        for x, y in zip(weights[0] + states[0], weights[1] + states[1], strict=True)
    )


def test_a_token_that_the_policy_gives_probability_zero_is_not_trained_but_counts_in_the_mean(
    model_dir: Path,
) -> None:
    def without_token_12(_: torch.nn.Module, __: object, logits: torch.Tensor) -> torch.Tensor:
        banned = torch.zeros(logits.shape[-1]).index_fill(0, torch.tensor([12]), -math.inf)
        return logits + banned

    policy, expected = (Policy(model_dir, settings()) for _ in range(2))
    for p in (policy, expected):
        p.model.lm_head.register_forward_hook(without_token_12)
        p.scores = Scores(p.model, p.settings)
    given = [sequence((2, 9, 10, 11, 12), "00111", -3.0, 1.0)]
    passes = FirstPasses(given, 0)
    (step,) = update(policy, given, 0, CISPO, 1e-3, "r/3.0", passes).steps
    ((_, seen),) = passes.gathered(ONE)
    assert seen is not None and np.isneginf(seen.logprobs).tolist() == [False, False, True]
    assert (step.now_at_zero, step.tokens, step.skipped) == (1, 3, None)
    (other,) = update(
        expected, [sequence((2, 9, 10, 11), "0011", -3.0, 1.0)], 0, CISPO, 1e-3, "r/3.0"
    ).steps
    assert step.loss == pytest.approx((other.loss or math.nan) * 2 / 3, rel=1e-5)
    assert measured(step).logp_diff == pytest.approx(measured(other).logp_diff, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("micro_batch_tokens", [8, 16384])
def test_rows_without_advantage_spare_their_passes_and_change_neither_loss_nor_gradient(
    model_dir: Path, micro_batch_tokens: int
) -> None:
    """Against the computation that passes them: an advantage too small for any float32 sum is an
    advantage.
    """
    skipping, passing = (
        Policy(model_dir, settings(packing="rows", micro_batch_tokens=micro_batch_tokens))
        for _ in range(2)
    )
    idle = (
        sequence((2, 9, 10, 11), "0011", -3.0, 0.0),
        sequence((2, 17, 18, 19, 20, 21), "001111", -1.0, -0.0),
    )
    with torch.no_grad():  # the first pass also looks at the head
        skipping.logprobs(collate(ROWS, 1.0, skipping.device))
    passed: list[int] = []
    skipping.model.base_model.register_forward_pre_hook(
        lambda _, __, given: passed.append(len(given["input_ids"])), with_kwargs=True
    )
    (a,) = update(skipping, [*ROWS, *idle], 0, CISPO, 1e-3, None).steps
    assert (sum(passed), a.passed_tokens) == (len(ROWS), a.tokens - 6)
    (b,) = update(
        passing, [*ROWS, *(with_advantage(r, 1e-30) for r in idle)], 0, CISPO, 1e-3, None
    ).steps
    assert b.passed_tokens == b.tokens == a.tokens
    assert (a.loss, a.grad_norm) == (
        pytest.approx(b.loss, rel=1e-5),
        pytest.approx(b.grad_norm, rel=1e-5),
    )
    for p, q in zip(skipping.model.parameters(), passing.model.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad, rtol=1e-4, atol=1e-5 * q.grad.abs().max().item())
    # AdamW divides by the size of the gradient: where that is rounding, so is the update.
    clear = [q.grad.abs() > 1e-3 * q.grad.abs().max() for q in passing.model.parameters()]
    # A step without any advantage goes on with AdamW's momentum, as zeros for gradients do.
    (a,) = update(skipping, idle, 1, CISPO, 1e-3, None).steps
    assert (a.loss, a.grad_norm, a.passed_tokens) == (0.0, 0.0, 0)
    (b,) = update(passing, [with_advantage(r, 1e-38) for r in idle], 1, CISPO, 1e-3, None).steps
    assert b.passed_tokens == b.tokens
    both = zip(skipping.model.parameters(), passing.model.parameters(), clear, strict=True)
    for p, q, known in both:
        assert torch.allclose(p[known], q[known], rtol=1e-4, atol=1e-5)


def test_a_batch_without_rows_changes_nothing(model_dir: Path) -> None:
    assert update(Policy(model_dir, settings()), (), 0, CISPO, 1e-3, None).steps == ()


def change(policy: Policy, lr: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Of all weights with a gradient, in one vector: how an update changed them, and what they
    were.
    """
    before = [p.detach().clone() for p in policy.model.parameters()]
    update(policy, ROWS, 0, CISPO, lr, None)
    moved = [
        (p.detach() - old)[p.grad != 0]
        for p, old in zip(policy.model.parameters(), before, strict=True)
    ]
    were = [old[p.grad != 0] for p, old in zip(policy.model.parameters(), before, strict=True)]
    return torch.cat(moved), torch.cat(were)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_small_learning_rate_moves_every_weight_whatever_the_dtype(
    model_dir: Path, dtype: str
) -> None:
    """A step of AdamW is about lr in each weight.

    In bfloat16 masters nearly all of them would be rounded away.
    """
    policy = Policy(model_dir, settings(dtype=dtype, lr=1e-6))
    moved, were = change(policy, 1e-6)
    assert (moved != 0).float().mean() > 0.99
    assert {p.dtype for p in policy.model.parameters()} == {torch.float32}
    assert {s["exp_avg"].dtype for s in policy.optimizer.state.values()} == {torch.float32}
    assert ((were + moved).bfloat16() != were.bfloat16()).float().mean() < 0.1, (
        "the test says nothing: lr is too high"
    )


def test_passes_in_bfloat16_give_nearly_the_gradient_of_float32(model_dir: Path) -> None:
    exact, narrow = Policy(model_dir, settings()), Policy(model_dir, settings(dtype="bfloat16"))
    difference = (logprobs(narrow, ROWS) - logprobs(exact, ROWS)).abs().max().item()
    assert 1e-5 < difference < 0.05, "the passes are in bfloat16, and no worse than that"
    for policy in (exact, narrow):
        update(policy, ROWS, 0, CISPO, 1e-3, None)
    a, b = (
        torch.cat([p.grad.flatten() for p in policy.model.parameters()])
        for policy in (exact, narrow)
    )
    assert torch.nn.functional.cosine_similarity(a, b, dim=0) > 0.99


def test_a_model_is_published_in_its_own_dtype_or_the_engines_and_learns_in_float32(
    tmp_path: Path,
) -> None:
    own = make_random_model(tmp_path / "own", dtype="bfloat16")
    policy = Policy(own, settings())
    assert policy.model.lm_head.weight.dtype == torch.float32
    update(policy, ROWS, 0, CISPO, 1e-3, None)
    for engine, dtype in (("auto", torch.bfloat16), ("float16", torch.float16)):
        policy.save(tmp_path / engine, policy.served_dtypes(engine))
        tensors = load_file(tmp_path / engine / "model.safetensors")
        assert {t.dtype for t in tensors.values()} == {dtype}
        assert json.loads((tmp_path / engine / "config.json").read_text())["dtype"] == str(
            dtype
        ).removeprefix("torch.")
        assert all(
            torch.equal(t, policy.model.state_dict()[name].to(dtype)) for name, t in tensors.items()
        )
        assert {p.name for p in (tmp_path / engine).iterdir()} == {p.name for p in own.iterdir()}
    served = policy.served_dtypes("float32")
    assert (served.main, served.others) == (torch.float32, {})
    assert policy.model.lm_head.weight.dtype == torch.float32, (
        "what is trained is not what was rounded"
    )


def test_a_tensor_that_its_model_keeps_in_float32_is_published_so(
    tmp_path: Path, model_dir: Path
) -> None:
    model, _ = load_masters(model_dir)
    kept = TensorDtypes(torch.bfloat16, {"model.norm.weight": torch.float32})
    save_rounded(model, tmp_path / "out", kept)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {n for n, t in tensors.items() if t.dtype == torch.float32} == {"model.norm.weight"}


def test_tied_embeddings_are_published_once_and_rounded_alike(
    tmp_path: Path, model_dir: Path
) -> None:
    config = json.loads((model_dir / "config.json").read_text()) | {
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }
    tied = tmp_path / "tied"
    shutil.copytree(model_dir, tied)
    (tied / "config.json").write_text(json.dumps(config))
    tensors = {
        n: t for n, t in load_file(tied / "model.safetensors").items() if n != "lm_head.weight"
    }
    save_file(tensors, tied / "model.safetensors", metadata={"format": "pt"})
    policy = Policy(tied, settings())
    update(policy, ROWS, 0, CISPO, 1e-3, None)
    policy.save(tmp_path / "out", policy.served_dtypes("auto"))
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == set(tensors)


def test_an_unreadable_model_names_the_setting(tmp_path: Path, model_dir: Path) -> None:
    with pytest.raises(SettingsError, match=r"trainer\.model_path: .*nowhere"):
        Policy(tmp_path / "nowhere", settings())
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_bytes((model_dir / "config.json").read_bytes())
    (broken / "model.safetensors").write_bytes(b"not tensors")
    with pytest.raises(SettingsError, match=r"trainer\.model_path: .*broken"):
        Policy(broken, settings())


def test_a_saved_policy_is_a_model_directory_with_everything_beside_the_weights(
    model_dir: Path, tmp_path: Path
) -> None:
    policy = Policy(model_dir, settings())
    policy.save(tmp_path / "out", policy.served_dtypes("auto"))
    assert {p.name for p in (tmp_path / "out").iterdir()} == {p.name for p in model_dir.iterdir()}
    again = Policy(tmp_path / "out", settings())
    assert logprobs(again, ROWS).tolist() == logprobs(policy, ROWS).tolist()


def test_staleness_counts_trained_tokens_of_this_run() -> None:
    assert staleness(tokens_by_version(ROWS), "r", 3) == (0 * 3 + 1 * 1, 4, 1), (
        "three fresh tokens, one of version 2, two of another run"
    )


def test_the_learning_rate_falls_linearly_to_the_last_version() -> None:
    s = settings(lr=5e-4, lr_decay="linear", lr_final=1e-4, max_versions=4)
    assert [learning_rate(s, k) for k in (0, 1, 2, 3, 4, 9)] == pytest.approx(
        [5e-4, 4e-4, 3e-4, 2e-4, 1e-4, 1e-4]
    )
    assert learning_rate(settings(lr=5e-4), 7) == 5e-4


def test_the_learning_rate_warms_up_and_falls_along_a_cosine() -> None:
    """As in transformers, except that the warm-up begins with a step above zero."""
    s = settings(lr=1.0, lr_decay="cosine", max_versions=6, lr_warmup_versions=2)
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    schedule = get_cosine_schedule_with_warmup(optimizer, 2, 6)
    expected = []
    for _ in range(7):
        expected.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert [learning_rate(s, k) for k in range(1, 7)] == pytest.approx([1.0, *expected[2:]])
    assert learning_rate(s, 0) == 0.5
