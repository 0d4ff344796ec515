"""Convert a selected trajectory to export rows. Pure, except for reading blobs.

Token formats have one row per training sequence of `clawstream.trainer.data.sequences`: a path of
the segment tree, on which each sampled token is trained once. Chat formats have one row per
conversation: a step that no other step continues.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from clawstream.export.row import ExportRow
from clawstream.export.segments import segments_of
from clawstream.export.selection import SelectedTrajectory
from clawstream.runtime.blob_store import BlobMissing
from clawstream.schemas.blob_refs import referenced
from clawstream.schemas.conversation import Chat, chat_of
from clawstream.schemas.records import Step, Trajectory
from clawstream.trainer.data.sequences import TrainingSequence, sequences_of

GetBlob = Callable[[str], bytes]
"""Returns the bytes of a SHA-256 in hex; raises BlobMissing."""
_RETRIED = "retried"


@dataclass(slots=True)
class Counts:
    """What an export has read and written.

    Attributes:
        tokens: tokens of all rows, context included; 0 in formats without tokens.
        trained_tokens: of these, tokens with the loss mask.
        skipped: trajectories or rows that were not written, by reason.
    """

    trajectories: int = 0
    rows: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    skipped: Counter[str] = field(default_factory=Counter)

    def add(self, row: ExportRow) -> None:
        """Count a written row."""
        self.rows += 1
        if row.tokens is not None:
            self.tokens += len(row.tokens.ids)
            self.trained_tokens += int(row.tokens.mask.sum())


def token_rows(
    selected: SelectedTrajectory, get_blob: GetBlob, counts: Counts
) -> Iterator[ExportRow]:
    """Yield a row for each training sequence.

    A trajectory without a token to train has none and is counted in `counts.skipped`.

    Raises:
        PayloadUnreadable: the steps of the lake contradict the trajectory.
    """
    selected = _with_metadata(selected, get_blob, counts)
    missing = [s for s in selected.steps if s.trainable and s.step_id not in selected.recorded]
    if missing:
        counts.skipped["steps not in the lake"] += 1
        return
    sequences = _sequences(selected)
    if not sequences:
        counts.skipped["no token to train"] += 1
    # The tokens of a sequence are the prompt and response of its last step.
    by_path = {
        (step.prompt_token_ids or b"") + step.response_token_ids: step
        for at in sorted(selected.steps, key=lambda s: s.offset)
        if (step := selected.recorded.get(at.step_id)) is not None
        and step.response_token_ids
        and _RETRIED not in at.marks
    }
    for sequence in sequences:
        step = by_path[sequence.tokens.ids.tobytes()]
        yield _row(selected, step, sequence, get_blob, counts)


def chat_rows(
    selected: SelectedTrajectory, get_blob: GetBlob, counts: Counts
) -> Iterator[ExportRow]:
    """Yield a row for each conversation: the last step of each branch, with its whole request.

    A step that is no chat, failed or was retried has none and is counted in `counts.skipped`.
    """
    selected = _with_metadata(selected, get_blob, counts)
    continued = {step.parent for step in selected.steps}
    for at in selected.steps:
        if at.index in continued or _RETRIED in at.marks:
            continue
        step = selected.recorded.get(at.step_id)
        if step is None:
            counts.skipped["steps not in the lake"] += 1
            continue
        if step.status != "ok":
            counts.skipped[f"status {step.status}"] += 1
            continue
        row = _row(selected, step, None, get_blob, counts)
        if row.chat is not None:
            yield row


def _sequences(selected: SelectedTrajectory) -> list[TrainingSequence]:
    """Return the training sequences; the advantage has no meaning."""
    origin = selected.origin
    if not origin.trainable:
        return []
    trajectory = Trajectory(
        run_id=origin.run_id,
        trajectory_key=origin.trajectory_id,
        trajectory_id=origin.trajectory_id,
        group_id=origin.group_id,
        channel="val" if origin.channel == "val" else "train",
        outcome="completed",
        opened_at=0,
        closed_at=0,
        part=0,
        parts=1,
        segments=segments_of(selected.steps, selected.recorded),
        steps=selected.steps,
    )
    return sequences_of(trajectory, selected.untrainable_steps)


def _row(
    selected: SelectedTrajectory,
    step: Step,
    sequence: TrainingSequence | None,
    get_blob: GetBlob,
    counts: Counts,
) -> ExportRow:
    return ExportRow(
        origin=selected.origin,
        step_id=step.step_id,
        step_tags=tuple(tag.name for tag in step.tags),
        model=step.model,
        chat=_chat(step, get_blob, counts),
        tokens=sequence.tokens if sequence is not None else None,
    )


def _with_metadata(
    selected: SelectedTrajectory, get_blob: GetBlob, counts: Counts
) -> SelectedTrajectory:
    """Return the trajectory with its metadata instead of a reference to a blob."""
    metadata = selected.origin.metadata_json
    blob = referenced("metadata_json", metadata.encode()) if metadata is not None else None
    if blob is None:
        return selected
    try:
        whole = get_blob(blob.sha256).decode("utf-8", "replace")
    except BlobMissing:
        counts.skipped["blob of the metadata is missing"] += 1
        whole = None
    return replace(selected, origin=replace(selected.origin, metadata_json=whole))


def _chat(step: Step, get_blob: GetBlob, counts: Counts) -> Chat | None:
    try:
        request, response = (
            get_blob(blob.sha256) if (blob := referenced(name, value)) is not None else value
            for name, value in (
                ("request_json", step.request_json),
                ("response_json", step.response_json),
            )
        )
    except BlobMissing:
        counts.skipped["blob of the request or reply is missing"] += 1
        return None
    chat = chat_of(step.protocol, request, response)
    if chat is None:
        counts.skipped["request or reply is no chat"] += 1
    return chat
