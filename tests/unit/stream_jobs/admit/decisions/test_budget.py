"""Test the rollout budget that admission publishes: a fold over its journal."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from support.admit import SOURCE, cand, entries, policy, refused

from clawstream.schemas.records import RolloutBudget
from clawstream.stream_jobs.admit.decisions.budget import DETAIL_CHARS, LISTED, BudgetFold
from clawstream.stream_jobs.admit.decisions.journal import Invalid, JournalRecord
from clawstream.stream_jobs.admit.fold import AdmissionFold


def budget_of(*records: JournalRecord) -> RolloutBudget:
    fold = BudgetFold("r", "train", "journal-1")
    for offset, record in enumerate(records):
        fold.apply(offset, record)
    assert BudgetFold.of(fold.budget()).budget() == fold.budget()
    return fold.budget()


def test_decisions_of_the_real_admission_are_counted() -> None:
    state = AdmissionFold("r", "train", SOURCE)
    log = entries(
        policy(batch_groups=1),
        cand("a", "g1", 1.0), cand("b", "g1", 0.0),
        cand("c", "g2", 1.0), cand("d", "g2", 1.0),
        cand("e", "g3", 1.0), cand("f", "g3", 0.0), cand("late", "g3"),
    )  # fmt: skip
    journal = [d for e in log for d in state.fold(e) if not isinstance(d, Invalid)]
    now = budget_of(*journal)
    assert (now.next_batch_seq, now.groups_admitted, now.groups_refused) == (2, 2, 1)
    assert (now.replacements_total, now.replacements) == (2, {"zero_variance": 2})
    (only,) = now.refusals
    assert (only.group_id, only.round, only.n, only.reason, only.total) == (
        "g2",
        0,
        2,
        "zero_variance",
        2,
    )
    assert (now.policy_version, now.batch_groups, now.sync_every) == (1, 1, 1)
    assert (now.journal_id, now.read_to, now.ended) == ("journal-1", len(journal), False)


def test_members_refused_one_by_one_and_the_end_of_a_run_ask_for_nothing() -> None:
    now = budget_of(refused("g", 0, "outcome"), refused("h", 2, "run_ended"))
    assert (now.replacements_total, now.refusals, now.groups_refused, now.ended) == (0, (), 1, True)


def test_the_record_is_bounded_and_refusals_that_are_not_listed_are_counted() -> None:
    now = budget_of(*(refused(f"g{i}", 1, detail="x" * 9000) for i in range(LISTED + 10)))
    assert (now.replacements_total, len(now.refusals), now.dropped) == (LISTED + 10, LISTED, 9)
    assert now.refusals[0].total == 11 and len(now.refusals[0].detail or "") == DETAIL_CHARS
    assert budget_of(*(refused(f"g{i}", 1) for i in range(LISTED))).dropped is None


@given(st.lists(st.integers(0, 3), max_size=40))
def test_each_refusal_that_asks_for_replacements_is_listed_with_its_offset(
    asked: list[int],
) -> None:
    now = budget_of(*(refused(f"g{i}", n) for i, n in enumerate(asked)))
    listed = [(r.offset, r.group_id, r.n) for r in now.refusals]
    assert listed == [(i, f"g{i}", n) for i, n in enumerate(asked) if n]
    assert [r.total for r in now.refusals] == [
        sum(asked[: i + 1]) for i, n in enumerate(asked) if n
    ]
    assert now.replacements_total == sum(asked) and now.read_to == len(asked)
