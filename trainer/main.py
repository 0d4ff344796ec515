"""The trainer: ready batches in, weight versions out.

One active for each run; the newest takes over.

Start
 1. The transactional producer's init fences every older trainer of the run: it fails at its next
    write (exit 78).
 2. The weights log is read to its end. `attempt` = one above every attempt of this run that was
    ever seen there or on disk.
 3. Directories whose version is not on this log are deleted: a trainer was killed between writing
    and publishing.
 4. The newest version whose checkpoint is whole is resumed: model, optimiser, random states,
    position. The run has no version: weights of trainer.model_path, start of today's ready-batches
    topic, published as `<run>/0.<attempt>`.
 5. The position is checked against the topic: another topic id starts at its start; the same with
    an end before it stops the process (exit 79).
Loop
 6. The next batch must have the next batch_seq. Its payload is read by place, and trained.
 7. At each multiple of sync_every: checkpoint (atomic), files of the version (atomic), manifest on
    the weights log in one transaction. Only with that do version and checkpoint count: killed
    before, the batches are trained again from the parent, so along the surviving chain each is
    trained exactly once.
 8. The position is committed to Kafka as advice, idle or not; files beyond keep_* are deleted.
Stop
 9. SIGTERM ends the loop after the batch in hand; what was trained since the last version is
    published. At max_versions it ends as well (exit 0).
"""

from __future__ import annotations

import threading
from functools import partial

import torch

from runtime.logs import logger
from runtime.process.lifecycle import run_sync
from runtime.process.readiness import ready
from runtime.topics.records import Decoder, cluster_of, create_topics
from schemas.errors import SettingsError
from schemas.settings import Settings, TrainerSettings
from trainer.data.batches import BatchReader, starting_position
from trainer.run import open_run
from trainer.settings_check import check_algorithm, check_learning_rate
from trainer.versions.weight_log import KafkaWeightLog, read_versions

POLL_S = 0.2


def main(settings: Settings) -> None:
    """The process `trainer`. Never returns."""
    run_sync("trainer", settings, train)


def train(settings: Settings, stop: threading.Event) -> None:
    """Train until `stop` or max_versions.

    Raises Fenced, SourceTruncated, SettingsError or TrainerError.
    """
    check_algorithm(settings)
    check_settings(settings.trainer)
    torch.set_num_threads(settings.trainer.threads)
    cluster, topics = cluster_of(settings), settings.kafka.topics
    create_topics(cluster, settings, [topics.ready_batches_spec(settings.run_id, "train")])
    decoder = Decoder(cluster, topics.schemas)
    weight_log = KafkaWeightLog(cluster, topics, settings.run_id)
    versions, taken = read_versions(cluster, decoder, topics.weights, settings.run_id)
    batches = topics.ready_batches(settings.run_id, "train")
    run = open_run(
        settings, weight_log, versions, taken, partial(starting_position, cluster, batches)
    )
    reader = BatchReader(cluster, settings, decoder, run.position, weight_log.dead_letter)
    ready(f"version {run.current_version.version_id}" if run.current_version else "")
    while not stop.is_set() and not run.finished:
        fetched = reader.next(POLL_S)
        if fetched is not None:
            run.train(fetched)
            if run.version_due:
                run.publish()
        reader.commit()
    if run.unpublished:
        run.publish()
    reader.commit()
    reader.close()
    weight_log.close()
    logger().info(
        "trainer_ended",
        version=run.current_version and run.current_version.version_id,
        finished=run.finished,
    )


def check_settings(settings: TrainerSettings) -> None:
    """Refuse what can't be trained with, before anything is fenced."""
    check_learning_rate(settings)
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise SettingsError(
            "setting trainer.device=cuda: torch finds no CUDA device here; use auto or cpu"
        )
