"""Describe the columns of the SQL views, for comments in DuckDB and the reference page. Pure.

`stream_jobs.lake.tables.catalog` describes the columns of tables. A view describes only its own
columns here; its other columns have the description of the table that the view selects from.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import pyarrow as pa

ASKS = re.compile(r"duckdb_columns|comment", re.IGNORECASE)
"""Pattern of queries that ask for comments: creating all of them takes 0.25 s."""

_INDEX = "Index of the step in its trajectory, from 0."
_PARENT = "Index of the step whose prompt and response this step's prompt starts with; null: none."
_WHY_UNTRAINABLE = "Why the step or trajectory can't be trained; null: it can."
_POLICY = "Version of the admission policy that applies to it; the policy is in `run_events`."
_SHARE = "Share of the conditions for training that are met, in [0, 1]."
_SCORE = "Quality in [0, 1]: a curation's if there is one, else the assessment's; null: not scored."
_STEP = {"step_id": "Step: `<call id>.<choice>`.", "step_index": _INDEX, "quality": _SCORE}
_READINESS = {
    "admission_policy_version": _POLICY,
    "ready": "True: the policy in force takes it.",
    "score": _SHARE,
    "quality": _SCORE,
    "staleness": (
        "Versions between its oldest trainable token and the newest published version; "
        "null: unknown."
    ),
}

VIEW_COLUMNS: Mapping[str, Mapping[str, str]] = {
    "trajectories": {
        "round": "Round of the group; null: not given.",
        "outcome": "Why it closed, e.g. completed, failed, abandoned.",
        "reason": "Reason given for the outcomes failed, abandoned and lost.",
        "reward": "Sum of the values given to the whole trajectory; null: there is none, never 0.",
        "weight_version": (
            "Id of the weights with the lowest sync index among its trainable tokens; null: "
            "unknown."
        ),
        "newest_sync_index": (
            "Highest sync index of this run among the trainable tokens; null: no version of "
            "this run."
        ),
        "steps": "Number of steps.",
        "untrainable_reason": _WHY_UNTRAINABLE,
        "revision": "Candidate revision that this row is: the newest.",
        "rewards": "Rewards that count at this revision, by source, name and target.",
        "step_details": "Steps by index, as in `trajectories_raw`.",
    },
    "steps": {
        "trajectory_id": "Trajectory that the step ended in; null: it has not closed yet.",
        "step_index": _INDEX,
        "parent_index": _PARENT,
        "drift": (
            "How the prompt continues what was sampled before; null: the trajectory has not "
            "closed yet."
        ),
        "trainable": "True: it can be trained. Null: the trajectory has not closed yet.",
        "untrainable_reason": _WHY_UNTRAINABLE,
        "marks": "Marks: late, duplicate, retried, orphan.",
    },
    "rewards": {
        "trajectory_id": "Target trajectory; null: that of the step is not known yet.",
        "step_id": "Target step; null: the whole trajectory.",
    },
    "curation": {
        "trajectory_id": "Target trajectory; null: that of the step is not known yet.",
        "step_id": "Target step; null: the whole trajectory.",
    },
    "findings": {
        "rule": "Quality rule, `name@version`.",
        "step_id": "Step that it is about; null: the whole trajectory.",
        "score": "Score in [0, 1]; null: the rule failed, and counts for nothing.",
        "evidence": "Evidence that the rule gives.",
    },
    "step_quality": {
        **_STEP,
        "assessed_quality": "Quality in [0, 1] by the quality rules alone; null: not assessed.",
        "trainable": "True: it can be trained.",
        "untrainable_reason": _WHY_UNTRAINABLE,
        "tags": "Names of the step's tags and of its curations' labels.",
        "response_tokens": "Number of sampled tokens.",
        "oldest_sync_index": (
            "Lowest sync index of this run among its tokens; null: no version of this "
            "run."
        ),
    },
    "readiness": {
        **_READINESS,
        "revision": "Candidate revision that is evaluated: the newest.",
        "awaits": "True: it lacks only a reward or an assessment, which may still arrive.",
        "lacks": "Conditions that are not met, named as the reasons of admission.",
        "trainable_tokens": "Sampled tokens that would be trained.",
    },
    "step_readiness": {
        **_STEP,
        **_READINESS,
        "ready": "True: the policy in force takes the step.",
        "lacks": "Conditions that are not met: untrainable, tagged, quality, stale.",
    },
    "lineage_versions": {
        "surviving": "True: the newest version of the run comes from this one, or is it.",
        "published_at": "Time at which it was published, by the log's clock.",
    },
    "lineage_steps": {
        "version_id": "Weight version that was trained on the step's batch; null: none yet.",
        "surviving": "True: the newest version of the run comes from that version, or is it.",
        "batches_topic_id": "Id of the topic of the batch.",
        "batch_seq": "Number of the batch.",
        "round": "Round of the group.",
        "trajectory_id": "Trajectory.",
        "revision": "Candidate revision that was admitted.",
        "reward": "Training reward of the trajectory; null: it has none.",
        "staleness": (
            "Versions between the trajectory's oldest trainable token and the version that "
            "its batch trains; null: unknown."
        ),
        "step_id": "Step: `<call id>.<choice>`.",
        "step_index": _INDEX,
        "parent_index": _PARENT,
        "response_tokens": "Number of sampled tokens.",
        "trained": "True: its tokens were trained.",
        "untrained_reason": "Why its tokens were not trained; null: no reason.",
        "sampled_by": "Ids of the weight versions that sampled its tokens.",
        "tags": "Names of the step's tags.",
        "drift": "How the prompt continues what was sampled before.",
    },
    "lineage_tokens": {
        "version": "Id of the weight version that sampled the tokens; null: not known.",
        "first_token": "First token, counted in response tokens of the step, from 0.",
        "end_token": "One past the last token.",
    },
}  # fmt: skip
"""View to the descriptions of its own columns."""

_MADE_OF = {
    "trajectories": ("candidates", "trajectories"),
    "findings": ("assessments",),
    "step_quality": ("candidates",),
    "readiness": ("candidates",),
    "step_readiness": ("candidates",),
    "lineage_versions": ("weights",),
    "lineage_steps": ("groups",),
    "lineage_tokens": ("steps",),
}
"""View to the tables that describe its other columns; by default the table of its name."""


def comment_of(field: pa.Field) -> str | None:
    """Return the description of a column or of a field inside one, or None."""
    found = (field.metadata or {}).get(b"comment")
    return found.decode() if found else None


def described(relation: str, column: str, schemas: Mapping[str, pa.Schema]) -> str | None:
    """Return the description of a view's or table's column, or None.

    Args:
        relation: a view, or a table's name followed by `_raw`.
        schemas: the columns of each table, with descriptions as metadata.
    """
    table = relation.removesuffix("_raw")
    own = VIEW_COLUMNS.get(relation, {}).get(column)
    if own is not None:
        return own
    for name in (table,) if relation != table else _MADE_OF.get(table, (table,)):
        at = schemas[name].get_field_index(column) if name in schemas else -1
        found = comment_of(schemas[name].field(at)) if at >= 0 else None
        if found is not None:
            return found
    return None


def statements(columns: Iterable[tuple[str, str]], schemas: Mapping[str, pa.Schema]) -> str:
    """Return SQL that sets the comments of columns, given as (relation, column)."""
    comments = (
        (relation, column, described(relation, column, schemas)) for relation, column in columns
    )
    return "; ".join(
        f"COMMENT ON COLUMN {_quoted(relation)}.{_quoted(column)} IS '{_escaped(text)}'"
        for relation, column, text in comments
        if text is not None
    )


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _escaped(text: str) -> str:
    return text.replace("'", "''")
