"""The trajectory that a reward, a curation or a completion is about. Pure.

A key that the gateway assigned (an anonymous key, or the session of a known agent) holds many
trajectories: a request about one of them names one of its steps.
"""

from __future__ import annotations

import re

from clawstream.gateway.errors import Unprocessable
from clawstream.schemas.errors import InvalidId
from clawstream.schemas.ids import check_trajectory_key, is_gateway_assigned, key_of_step

ULID = re.compile("[0-9A-HJKMNP-TV-Z]{26}")
STEP_ID = re.compile(rf".+~{ULID.pattern}\.\d{{1,9}}")


def target_of(trajectory_id: str | None, step_id: str | None) -> str:
    """Return the trajectory key of a target.

    Raises:
        Unprocessable: An id is invalid; the error names the field.
    """
    if step_id is not None:
        return _key_of_step(trajectory_id, step_id)
    if trajectory_id is None:
        raise Unprocessable("trajectory_id: or step_id must say what it is about", "trajectory_id")
    key, _, ulid = trajectory_id.partition("~")
    if is_gateway_assigned(key) and ULID.fullmatch(ulid):
        return key
    check_one_trajectory(key, "trajectory_id")
    try:
        return check_trajectory_key(trajectory_id)
    except InvalidId as error:
        raise Unprocessable(str(error), "trajectory_id") from error


def _key_of_step(trajectory_id: str | None, step_id: str) -> str:
    if not STEP_ID.fullmatch(step_id):
        raise Unprocessable(
            f"step_id: {step_id[:80]!r} is not <trajectory>~<ulid>.<choice>", "step_id"
        )
    try:
        key = key_of_step(step_id)
    except InvalidId as error:
        raise Unprocessable(str(error), "step_id") from error
    within = trajectory_id is None or f"{trajectory_id}~".startswith(f"{key}~")
    if not within:
        raise Unprocessable(f"step_id: a step of {key}, not of trajectory_id", "step_id")
    return key


def check_one_trajectory(key: str, field: str) -> None:
    """Raise Unprocessable, which names the field, if the gateway assigned the key."""
    if is_gateway_assigned(key):
        raise Unprocessable(
            f"{field}: {key} is a key that the gateway made, it may hold many trajectories. "
            "Say which one by step_id, a step of it",
            field,
        )
