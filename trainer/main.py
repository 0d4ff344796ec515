"""The trainer: reads ready batches, publishes weight versions.

Each run has one active trainer; the newest takes over. Under torchrun it has several processes: the
first one leads, and the others train what it reads (`clawstream.trainer.parallel`).

Start
 1. The init of the transactional producer fences every older trainer of the run: the older trainer
    fails at its next write (exit 78).
 2. The weights log is read to its end. `attempt` is one above every attempt of this run on the log
    or on disk.
 3. Directories whose version is not on this log are deleted: their trainer was killed between
    writing and publishing. So are unfinished ones.
 4. The newest version on the log with a complete checkpoint is resumed: model, optimiser, random
    states, position. Its copy at trainer.checkpoint_uri is completed. Later versions are abandoned.
    A run without a version starts with the weights of trainer.model_path and the start of today's
    ready-batches topic; the trainer publishes `<run>/0.<attempt>`.
 5. The position is checked against the topic. With another topic id, reading begins at that topic's
    start. With the same id and an end before the position, the process stops (exit 79).
Loop
 6. The next batch must have the next batch_seq. Its payload is read by offset, in a thread while
    the batch before is trained. Then it is trained. At most one batch is ahead; it is in no
    position.
 7. At each multiple of sync_every: files of the version (atomic), then the manifest on the weights
    log in one transaction, which makes the version valid. What was seen of its tokens is in the
    same transaction.
 8. Every save_every versions, after the manifest: the state is copied to CPU memory, and a thread
    writes the copy (atomic). After a kill, the batches since the checkpoint are trained again, so
    each batch is trained exactly once along the surviving chain.
 9. The position of training is committed to Kafka for lag displays, idle or not, with a heartbeat
    while the work in hand is within its time limits; files beyond keep_* are deleted.
    Validation batches that have come are folded at the start and between batches; nothing is
    stored of them.
Stop
10. SIGTERM ends the loop after the current batch; training since the last version is published, and
    its checkpoint completed. The loop also ends at max_versions (exit 0).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import partial

import torch
from prometheus_client import CollectorRegistry

from clawstream.runtime.logs import configure, logger
from clawstream.runtime.process.lifecycle import run_sync
from clawstream.runtime.process.metrics import serving_metrics
from clawstream.runtime.process.readiness import ready
from clawstream.runtime.topics.access import check_access
from clawstream.runtime.topics.records import Decoder, cluster_of, create_topics
from clawstream.schemas.errors import SettingsError
from clawstream.schemas.settings import Settings, TrainerSettings
from clawstream.trainer.algorithms.registry import load_algorithm, setting_of
from clawstream.trainer.data.batches import BatchReader, FetchedBatch
from clawstream.trainer.data.prefetch import Prefetch
from clawstream.trainer.data.validation_reader import ValidationReader
from clawstream.trainer.liveness.commits import PositionCommits
from clawstream.trainer.liveness.watchdog import Watchdog
from clawstream.trainer.metrics.monitor import Monitor
from clawstream.trainer.metrics.prometheus import VersionMetrics
from clawstream.trainer.metrics.validation import Validations
from clawstream.trainer.parallel.processes import Processes, open_processes
from clawstream.trainer.position import start_of, starting_position
from clawstream.trainer.run import FILES_S
from clawstream.trainer.settings_check import (
    check_algorithm,
    check_best_by,
    check_learning_rate,
    check_models,
    check_versions,
)
from clawstream.trainer.start import open_run
from clawstream.trainer.step import train_batch
from clawstream.trainer.versions.weight_log import KafkaWeightLog, NoWeightLog, read_versions

POLL_S = 0.2


@dataclass(frozen=True)
class Next:
    """What all processes do next. batch: to train; None: wait."""

    batch: FetchedBatch | None
    ends: bool = False


NOTHING = Next(None)


def main(settings: Settings) -> None:
    """Run the process `trainer`. Never returns."""
    run_sync("trainer", settings, train)


def train(settings: Settings, stop: threading.Event) -> None:
    """Train until `stop` is set or max_versions is reached.

    Raises:
        Fenced: a newer trainer of the run has started.
        SourceTruncated: the topic has lost batches that are not trained yet.
        SettingsError: the settings do not fit the run.
        TrainerError: any other failure of the trainer.
    """
    check_algorithm(settings)
    check_settings(settings.trainer)
    check_versions(settings)
    # A function of the user's own that does not exist ends the trainer here, not at a batch.
    algorithm = load_algorithm(settings, settings.admit.policy.algorithm)
    check_models(algorithm.needs, f"setting {setting_of('advantage')}", settings.trainer)
    torch.set_num_threads(settings.trainer.threads)
    with open_processes(settings.trainer.device) as processes:
        if processes.leads:
            metrics, registry = VersionMetrics(), CollectorRegistry()
            registry.register(metrics)
            # A port in use ends this trainer here, before it fences the one that may be using it.
            with serving_metrics(settings, "trainer", registry):
                lead(settings, stop, processes, metrics)
        else:
            follow(settings, processes)


def lead(
    settings: Settings, stop: threading.Event, processes: Processes, metrics: VersionMetrics
) -> None:
    """Read the batches, train them with the other processes, and publish versions."""
    cluster, topics = cluster_of(settings), settings.kafka.topics
    specs = [topics.ready_batches_spec(settings.run_id, channel) for channel in ("train", "val")]
    create_topics(cluster, settings, specs)
    check_access(cluster, settings, "trainer")
    decoder = Decoder(cluster, topics.schemas)
    weight_log = KafkaWeightLog(cluster, topics, settings.run_id)
    versions, taken = read_versions(cluster, decoder, topics.weights, settings.run_id)
    locate = partial(starting_position, cluster, topics.ready_batches(settings.run_id, "train"))
    training, reading = processes.watchdog, Watchdog()
    with PositionCommits(
        cluster, settings, lambda: training.in_time or reading.in_time
    ) as position_commits:
        with training.work("start", FILES_S):
            run = open_run(settings, weight_log, versions, taken, locate, processes)
        validation = ValidationReader(cluster, settings, decoder)
        monitor = Monitor(settings, len(versions), run.sync_index + 1, metrics)
        validations = Validations()
        assert run.current_version is not None  # the initial version is published at the latest
        ready(f"version {run.current_version.version}")

        def validate() -> None:
            for changed in validations.add(validation.read()):
                run.validated(changed)
                monitor.validation(changed)

        validate()  # before any deletion, also when nothing is trained: keep_best_by needs it
        source = partial(
            BatchReader,
            cluster,
            settings,
            decoder,
            run.position,
            run.read_images,
            position_commits.move,
            reading,
        )
        with Prefetch(source, weight_log.dead_letter) as batches:
            while not stop.is_set() and not run.finished:
                validate()
                fetched = batches.next(run.position.next_batch_seq, POLL_S)
                fetched = processes.broadcast(Next(fetched)).batch
                if fetched is not None:
                    train_batch(run, fetched)
                    if run.version_due:
                        run.publish()
                    monitor.versions(run.versions)
            processes.broadcast(Next(None, ends=True))
            run.end()
            batches.close()
    validation.close()
    weight_log.close()
    monitor.close(run.versions)
    logger().info(
        "trainer_ended",
        version=str(run.current_version.version),
        finished=run.finished,
    )


def follow(settings: Settings, processes: Processes) -> None:
    """Train the batches that the leader reads, until it ends."""
    name = f"trainer.{processes.rank}"
    configure(name, "critical")  # the leader logs the same
    nowhere = partial(start_of, "", "")  # the leader locates the position
    try:
        run = open_run(settings, NoWeightLog(), (), frozenset(), nowhere, processes)
        while not (received := processes.broadcast(NOTHING)).ends:
            if received.batch is not None:
                train_batch(run, received.batch)
                if run.version_due:
                    run.publish()
        run.end()
    except Exception:  # every error ends this process: log the reason
        configure(name, "error")
        raise


def check_settings(settings: TrainerSettings) -> None:
    """Refuse unusable settings before the trainer fences another one."""
    check_learning_rate(settings)
    check_best_by(settings)
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise SettingsError(
            "setting trainer.device=cuda: torch finds no CUDA device here; use auto or cpu"
        )
