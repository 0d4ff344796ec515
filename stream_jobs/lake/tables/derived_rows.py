"""Derive rows of tables that are not the fields of one record. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from statistics import fmean
from typing import Any

import orjson

from clawstream.schemas import records
from clawstream.schemas.codec.avro_schema import Schema, expanded, not_null
from clawstream.schemas.codec.single_object import as_dict, shipped
from clawstream.schemas.reward_matching import training_reward
from clawstream.stream_jobs.lake.tables.arrow_columns import tupled
from clawstream.stream_jobs.lake.tables.table import Headers, Row, Table


def drop_truncated_tokens(table: Table, fields: Row, headers: Headers) -> Row:
    """Keep a step whose packed fields are truncated, without tokens but with the reason."""
    for name in ("prompt_token_ids", "response_token_ids", "response_logprobs"):
        packed = fields[table.index[name]]
        if packed is not None and len(packed) % 4:
            repaired = list(fields)
            repaired[table.index[name]] = None
            repaired[table.index["tokens_absent_reason"]] = (
                f"{name} has {len(packed)} bytes, not a multiple of 4"
            )
            fields = tuple(repaired)
    return fields


def add_payload_position(table: Table, fields: Row, headers: Headers) -> Row:
    """Add the payload's position from the headers; null if a header is missing or invalid."""
    topic_id, *numbers = (
        headers.get(name, b"").decode("ascii", "replace") for name in _PAYLOAD_HEADERS
    )
    return (*fields, topic_id or None, *(int(n) if n.isdecimal() else None for n in numbers))


_PAYLOAD_HEADERS = ("topic_id", "partition", "first_offset", "last_offset")


def batch_rows(batch: records.ReadyBatch) -> Iterable[Mapping[str, Any]]:
    rewards = [
        r
        for g in batch.groups
        for m in g.members
        if (r := training_reward(batch.reward_weights, m.rewards)) is not None
    ]
    more = {
        "group_ids": [g.group_id for g in batch.groups],
        "trajectories": sum(len(g.members) for g in batch.groups),
        "reward_mean": fmean(rewards) if rewards else None,
        "admission_policy_version": batch.policy_version,
    }
    return (dict(as_dict(batch)) | more,)


@cache
def member_schema() -> Schema:
    """Return the schema of the members of a batch's group."""
    batch = expanded(shipped("ReadyBatch"))
    groups = next(f for f in batch["fields"] if f["name"] == "groups")
    fields = not_null(groups["type"])["items"]["fields"]
    return next(f for f in fields if f["name"] == "members")["type"]


def admitted_rows(batch: records.ReadyBatch) -> Iterable[Mapping[str, Any]]:
    for index, (group, plain) in enumerate(
        zip(batch.groups, as_dict(batch)["groups"], strict=True)
    ):
        rewards = [training_reward(batch.reward_weights, m.rewards) for m in group.members]
        known = [r for r in rewards if r is not None]
        syncs = [m.oldest_sync_index for m in group.members if m.oldest_sync_index is not None]
        yield {
            "run_id": batch.run_id,
            "channel": batch.channel,
            "group_id": group.group_id,
            "round": group.round,
            "n": group.n,
            "admitted": True,
            "batch_seq": batch.batch_seq,
            "index": index,
            "whole_group": True,
            "trajectory_ids": [m.trajectory_id for m in group.members],
            "revisions": [m.revision for m in group.members],
            "rewards": rewards,
            "reward_mean": fmean(known) if known else None,
            "trainable_tokens": sum(m.trainable_tokens for m in group.members),
            "oldest_sync_index": min(syncs, default=None),
            "staleness": [_staleness(batch, m) for m in group.members],
            "admission_policy_version": batch.policy_version,
            "members": tupled(member_schema(), [_without_texts(m) for m in plain["members"]]),
        }


def _without_texts(member: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a member without the reasons of missing rewards, which may quote a trajectory.

    The table outlives an erasure; `rewards` has the reasons.
    """
    return {**member, "rewards": [{**r, "reason": None} for r in member["rewards"]]}


def _staleness(batch: records.ReadyBatch, member: records.BatchMember) -> int | None:
    """Return the versions between a member's oldest token and the one that its batch trains.

    This is the staleness that admission checks. None: a validation batch, which trains nothing, or
    a member whose tokens have no sync index.
    """
    if batch.channel == "val" or member.oldest_sync_index is None:
        return None
    return batch.batch_seq // batch.sync_every - member.oldest_sync_index


def refused_rows(refused: records.Refused) -> Iterable[Mapping[str, Any]]:
    yield {
        "run_id": refused.run_id,
        "channel": refused.channel,
        "group_id": refused.group_id,
        "round": refused.round,
        "n": refused.n,
        "admitted": False,
        "whole_group": refused.whole_group,
        "reason": refused.reason,
        "detail": refused.detail,
        "trajectory_ids": list(refused.trajectory_ids),
        "revisions": list(refused.revisions),
    }


def run_event_rows(event: Any) -> Iterable[Mapping[str, Any]]:
    match event:
        case records.AdmissionPolicy():
            yield {
                "run_id": event.run_id,
                "kind": "policy",
                "admission_policy_version": event.policy_version,
                "policy_json": _json(event),
                "created_at": event.created_at,
            }
        case records.PolicyApplied():
            yield {
                "run_id": event.run_id,
                "kind": "policy_applied",
                "channel": event.channel,
                "admission_policy_version": event.policy.policy_version,
                "policy_json": _json(event.policy),
                "from_offset": event.from_offset,
                "created_at": event.policy.created_at,
            }
        case records.RunEnded():
            yield {
                "run_id": event.run_id,
                "kind": "ended",
                "reason": event.reason,
                "created_at": event.created_at,
            }


def _json(event: Any) -> bytes:
    return orjson.dumps(as_dict(event))
