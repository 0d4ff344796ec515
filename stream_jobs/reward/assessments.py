"""Combine the scores of quality rules for a closed trajectory into one record. Pure.

The score of a step is the lowest that any rule gives it; 1.0 when no rule names it. A rule scores
the trajectory directly, or by the mean of its steps without marks; the lowest of these counts. A
rule that raises, or whose scores are outside [0, 1], is ignored and recorded with the reason. The
record's id depends only on the trajectory and the rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from clawstream.rewards.quality.registry import Rule, rules_of_run
from clawstream.rewards.quality.score import Score
from clawstream.schemas.ids import stable_id
from clawstream.schemas.records import Assessment, Finding, Trajectory
from clawstream.schemas.rule_spec import reason_text
from clawstream.schemas.user_function import Find

DIGITS = 4
"""Each step carries its score, also in the state of assemble: keep it short."""
FINDINGS_MAX = 200


def quality_rules_of(
    configured: Mapping[str, tuple[str, ...]], find: Find
) -> dict[str, tuple[Rule, ...]]:
    """Resolve the quality rules by run id or `*`. Raises SettingsError naming the setting."""
    return {
        run: rules_of_run(specs, f"jobs.quality_functions.{run}", find)
        for run, specs in configured.items()
    }


def assessment_of(trajectory: Trajectory, rules: Sequence[Rule], created_at: int) -> Assessment:
    """Assess a complete trajectory. created_at: microseconds, informational."""
    if trajectory.outcome == "lost":
        return not_assessed(
            trajectory, rules, created_at, f"trajectory lost: {trajectory.reason or 'no payload'}"
        )
    counted = [s.index for s in trajectory.steps if not s.marks] or range(len(trajectory.steps))
    whole, steps, findings = list[float](), [1.0] * len(trajectory.steps), list[Finding]()
    for rule in rules:
        try:
            scores = _scores(rule, trajectory)
            own = _by_step(scores, trajectory) if scores else {}
            found = [_finding(rule, score) for score in scores if score.value < 1]
        except MemoryError:
            raise
        except Exception as e:  # noqa: BLE001 - a user's rule: its error is the recorded reason
            findings.append(_finding(rule, Score(0.0, reason_text(e)), failed=True))
            continue
        findings += found
        for index, value in own.items():
            steps[index] = min(steps[index], value)
        direct = [s.value for s in scores if s.step is None]
        if direct:
            whole.append(min(direct))
        elif steps:
            whole.append(fmean(own.get(i, 1.0) for i in counted) if own else 1.0)
    quality = min(whole, default=None)
    scored = () if quality is None else steps
    return _assessment(trajectory, rules, created_at, quality, scored, findings)


def not_assessed(
    trajectory: Trajectory, rules: Sequence[Rule], created_at: int, reason: str
) -> Assessment:
    """Return the assessment when no rule could run. created_at: microseconds."""
    findings = [_finding(rule, Score(0.0, reason), failed=True) for rule in rules]
    return _assessment(trajectory, rules, created_at, None, (), findings)


def _scores(rule: Rule, trajectory: Trajectory) -> list[Score]:
    """Call the rule and validate its scores. Raises the rule's error, TypeError or ValueError."""
    result = rule.function(trajectory)
    if result is None:
        return []
    if isinstance(result, Mapping):
        scores = [Score(value, None, step) for step, value in result.items()]
    elif isinstance(result, int | float):
        scores = [Score(result)]
    else:
        # A child process returns plain lists.
        scores = [score if isinstance(score, Score) else Score(*score) for score in result]
    for score in scores:
        if not isinstance(score.value, int | float):
            raise TypeError(f"a score is a number, not {type(score.value).__name__}")
        if not 0 <= score.value <= 1:
            raise ValueError(f"a score is in [0, 1], not {score.value}")
        if not isinstance(score.evidence, str | None):
            raise TypeError(f"evidence is text, not {type(score.evidence).__name__}")
    return scores


def _by_step(scores: Iterable[Score], trajectory: Trajectory) -> dict[int, float]:
    """Return the lowest score of each named step, by step index."""
    named = [s for s in scores if s.step is not None]
    if not named:
        return {}
    index, lowest = {s.step_id: s.index for s in trajectory.steps}, dict[int, float]()
    for score in named:
        if score.step not in index:
            raise ValueError(f"no step {score.step!r} in the trajectory")
        at = index[score.step]
        lowest[at] = min(score.value, lowest.get(at, 1.0))
    return lowest


def _finding(rule: Rule, score: Score, failed: bool = False) -> Finding:
    evidence = reason_text(score.evidence) if score.evidence else None
    value = None if failed else round(float(score.value), DIGITS)
    return Finding(rule=str(rule), step_id=score.step, score=value, evidence=evidence)


def _assessment(
    trajectory: Trajectory,
    rules: Sequence[Rule],
    created_at: int,
    quality: float | None,
    steps: Iterable[float],
    findings: Sequence[Finding],
) -> Assessment:
    names = tuple(map(str, rules))
    return Assessment(
        event_id=stable_id(trajectory.run_id, trajectory.trajectory_id, "assessment", *names),
        run_id=trajectory.run_id,
        trajectory_key=trajectory.trajectory_key,
        trajectory_id=trajectory.trajectory_id,
        rules=names,
        quality=None if quality is None else round(quality, DIGITS),
        step_quality=tuple(round(value, DIGITS) for value in steps),
        findings=tuple(findings[:FINDINGS_MAX]),
        assessment_revision=sum(rule.revision for rule in rules),
        by="clawstream.reward",
        created_at=created_at,
    )
