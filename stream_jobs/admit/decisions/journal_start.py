"""Check that a journal still has its beginning and was not recreated. Reads only."""

from __future__ import annotations

from runtime.kafka import Cluster
from runtime.topics.records import Decoder
from schemas.errors import Undecodable, UnknownSchema
from schemas.records import WeightVersion
from stream_jobs.errors import UnreadableJournal


def first_offset(cluster: Cluster, journal: str) -> int:
    """Return the first offset of the journal; 0 when it is complete."""
    return cluster.watermarks(journal, [0])[0][0]


def check_complete(cluster: Cluster, journal: str) -> None:
    """Raise UnreadableJournal when the journal has lost its beginning: decisions would repeat."""
    first = first_offset(cluster, journal)
    if first > 0:
        raise UnreadableJournal(
            f"{journal} begins at offset {first}, what was decided before can't be known. Its run "
            "has ended and `clawstream "
            "topics trim` was here: take another run_id. Or retention took it from a run that "
            "lives: that can't go on either"
        )


def check_not_recreated(
    cluster: Cluster, decoder: Decoder, weights: str, run_id: str, journal: str, journal_id: str
) -> None:
    """Hold a journal without records against the versions that the run has published.

    Batches of a new journal count from 0. Staleness is judged by that number, so for weights that
    were trained further the gate would let everything pass, however stale.

    Args:
        cluster: where both are.
        decoder: of the weights log.
        weights: the topic of the versions of all runs.
        run_id: whose versions count.
        journal: the ready-batches topic.
        journal_id: its id.

    Raises:
        UnreadableJournal: a version was trained from a journal with another id.
    """
    for record in cluster.read_all(weights):
        if not (record.key or b"").startswith(f"{run_id}/".encode()):
            continue
        try:
            version = decoder.decode(record.value)
        except (Undecodable, UnknownSchema):
            continue  # the lake buries it
        if not isinstance(version, WeightVersion) or version.last_batch_seq is None:
            continue
        if version.batches_topic_id not in (None, journal_id):
            raise UnreadableJournal(
                f"{journal} was recreated (id {journal_id}), but {version.version_id} was trained "
                "from "
                f"batches up to {version.last_batch_seq} of its predecessor (id "
                f"{version.batches_topic_id}): what that decided can't be known. Restore it, or "
                "take "
                "another run_id, with trainer.model_path set to the published weights"
            )
