"""Remember the tokens of replies, so that the next request can continue them.

A reply is found by its trajectory, by what must stay the same, and by the digest of all messages up
to it. A trajectory may have many: choices, sub-agents, repeated calls. Each reply refers to the one
that it continued, so that the tokens of a conversation are stored once. When the memory is full,
the trajectory that was used least recently is forgotten.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from clawstream.gateway.attribution.resolver import TrajectoryRef
from clawstream.gateway.continuation.history import (
    UNREADABLE,
    Context,
    History,
    after_reply,
    history_of,
)
from clawstream.schemas.engine_frames import Prior
from clawstream.schemas.records import Continuation, Step

HISTORY_EDITED = "history_edited"
NO_MEMORY = "no_memory"
ENGINE = "engine"
OVERHEAD_BYTES = 500
"""Approximate bytes of a remembered reply beside its ids."""
ID_BYTES = 4


class Reply(NamedTuple):
    """The tokens of a step, packed.

    parent: The reply whose tokens begin the prompt; None: `prompt` is all of it.
    prompt: Ids of the prompt behind those of the parent.
    tokenizer: Fingerprint of the engine's tokenizer; None: not known.
    """

    step_id: str
    parent: Reply | None
    prompt: bytes
    sampled: bytes
    tokenizer: str | None

    def prompt_ids(self) -> bytes:
        """Return all ids of the prompt."""
        parts, at = [self.prompt], self.parent
        while at is not None:
            parts += [at.sampled, at.prompt]
            at = at.parent
        return b"".join(reversed(parts))


@dataclass(frozen=True, slots=True)
class Lookup:
    """What is known of the earlier turn of a request.

    reply: None: nothing, for the reason in `reason`.
    prompt_ids: Of the reply.
    replies: Of the trajectory, with `reply`.
    """

    trajectory: TrajectoryRef
    history: History | None
    reply: Reply | None = None
    prompt_ids: bytes = b""
    reason: str | None = None
    replies: _Trajectory | None = None

    def prior(self, renderer: str, limit: int | None) -> Prior | None:
        """Return the tokens for the engine; see `Prior`."""
        reply = self.reply
        if reply is None:
            return None
        return Prior(renderer, self.prompt_ids, reply.sampled, limit, reply.tokenizer)

    def outcome(self, prompt_ids: bytes | None, rendered: str | None) -> Continuation:
        """Return what a step records.

        Args:
            prompt_ids: Packed, as the engine reported them.
            rendered: Why the engine rendered the prompt, if it said so.
        """
        reply = self.reply
        if reply is None:
            return Continuation(reason=self.reason)
        kept = len(self.prompt_ids) + len(reply.sampled)
        if prompt_ids is not None and prompt_ids.startswith(self.prompt_ids + reply.sampled):
            return Continuation(
                previous_step_id=reply.step_id, kept_tokens=kept // ID_BYTES, reason=rendered
            )
        return Continuation(previous_step_id=reply.step_id, reason=rendered or ENGINE)


class _Trajectory:
    """The replies of a trajectory. size: Bytes, of replaced ones too, because others need them."""

    __slots__ = ("replies", "size")

    def __init__(self) -> None:
        self.replies: dict[tuple[bytes, Context], Reply] = {}
        self.size = 0

    def find(self, history: History) -> Reply | str:
        """Return the reply that a request continues, or why there is none."""
        continued = history.continued
        assert continued is not None
        found = self.replies.get((continued, history.context))
        if found is not None:
            return found
        for (digest, context), _ in reversed(self.replies.items()):
            if digest == continued and (change := context.change(history.context)) is not None:
                return change
        return HISTORY_EDITED


class ContinuationMemory:
    """Remembers replies, at most `limit` bytes of them."""

    def __init__(self, limit: int) -> None:
        self._limit, self.size = limit, 0
        self._trajectories: OrderedDict[tuple[str, str], _Trajectory] = OrderedDict()

    def look_up(self, trajectory: TrajectoryRef, payload: Mapping[str, Any]) -> Lookup:
        """Find the reply that a request continues. payload: Its body."""
        history = history_of(payload)
        if history is None:
            return Lookup(trajectory, None, reason=UNREADABLE)
        if history.blocked is not None:
            return Lookup(trajectory, history, reason=history.blocked)
        key = trajectory.run_id, trajectory.trajectory_key
        known = self._trajectories.get(key)
        if known is None:
            return Lookup(trajectory, history, reason=NO_MEMORY)
        self._trajectories.move_to_end(key)
        found = known.find(history)
        if isinstance(found, str):
            return Lookup(trajectory, history, reason=found)
        return Lookup(trajectory, history, found, found.prompt_ids(), replies=known)

    def remember(self, lookup: Lookup, step: Step) -> None:
        """Remember the reply to a request, unless it is incomplete. step: Not redacted."""
        prompt, sampled = step.prompt_token_ids, step.response_token_ids
        if (
            lookup.history is None
            or step.status != "ok"
            or step.tokens_absent_reason is not None
            or not prompt
            or not sampled
        ):
            return
        digest = after_reply(lookup.history, step.response_json)
        if digest is None:
            return
        key = lookup.trajectory.run_id, lookup.trajectory.trajectory_key
        known, parent = self._trajectories.get(key), None
        kept = step.continuation.kept_tokens if step.continuation is not None else None
        if known is None:
            known = self._trajectories[key] = _Trajectory()
        # A parent that was forgotten meanwhile would stay in memory without being counted.
        if kept is not None and known is lookup.replies:
            parent, prompt = lookup.reply, prompt[kept * ID_BYTES :]
        self._trajectories.move_to_end(key)
        place = digest, lookup.history.context
        known.replies.pop(place, None)  # the newest one is the last one
        known.replies[place] = Reply(
            step.step_id, parent, prompt, sampled, step.tokenizer_fingerprint
        )
        size = len(prompt) + len(sampled) + OVERHEAD_BYTES
        known.size += size
        self.size += size
        while self.size > self._limit:
            _, forgotten = self._trajectories.popitem(last=False)
            self.size -= forgotten.size
