"""Run the admission process: one fenced, journaled fold for each channel of a run.

The journal, its output topic, is its only state.

Protocol of a channel:

1. `init_transactions` of `<prefix>-admit.<run>.<channel>` fences any earlier process and aborts its
   open transaction.
2. Read the journal `ready-batches.<run>.<channel>` to its end. It gives the next batch number, the
   decided trajectories, closed rounds, the policy, and `input_from`, the offset to resume from. A
   checkpoint file (`clawstream.stream_jobs.admit.decisions.checkpoint`) replaces the part it
   covers. If the candidates topic has another id, start at its beginning and log a warning. If the
   id is the same but the topic ends before the position, stop.
3. Read the candidates from that offset, or from the run's first later record: a new run need not
   fold ticks older than itself. Start early enough for one tick of every source partition, so that
   event time is known. Decided candidates fold to nothing; the rest restores the earlier state.
4. Write the decisions of several records, in log order, in one transaction with their dead letters.
   So all decisions of a step are in the journal, or none.
5. Publish the rollout budget on `budgets`, about once a second, in a transaction of its own.
6. Commit the reader's position after the transaction, as advice. A transaction with dead letters
   commits it inside: below that position a restart writes no dead letters. No process resumes from
   this position.
"""

from __future__ import annotations

import threading

from clawstream.runtime.kafka import Cluster
from clawstream.runtime.logs import logger
from clawstream.runtime.process.lifecycle import run_sync
from clawstream.runtime.process.metrics import serving_metrics
from clawstream.runtime.process.readiness import ready
from clawstream.runtime.topics.access import check_access
from clawstream.runtime.topics.records import Decoder, cluster_of, create_topics, now_micros
from clawstream.schemas.errors import SettingsError
from clawstream.schemas.settings import Settings
from clawstream.stream_jobs.admit.admitter import PROCESS, ChannelAdmitter
from clawstream.stream_jobs.admit.decisions.metrics import DecisionMetrics
from clawstream.stream_jobs.admit.policy import next_policy, policy_of
from clawstream.stream_jobs.errors import PolicyRefused

IDLE_S = 0.05
PUBLISH_ATTEMPTS = 10


def publish_policy(
    settings: Settings, cluster: Cluster, decoder: Decoder, admitter: ChannelAdmitter
) -> None:
    """Publish the settings' policy if the settings changed since they were last published.

    A policy set by a user meanwhile stays in force until then.

    Raises:
        SettingsError: The settings have another sync_every than the run.
        PolicyRefused: Other writers took the version in every attempt.
    """
    for _ in range(PUBLISH_ATTEMPTS):
        published = admitter.published()
        version = published.newest.policy_version + 1 if published.newest is not None else 1
        policy = policy_of(settings, version, now_micros())
        if published.newest is not None and published.newest.sync_every != policy.sync_every:
            raise SettingsError(
                f"setting admit.policy.sync_every: is {published.newest.sync_every} for the whole "
                f"of run {settings.run_id}, got "
                f"{policy.sync_every}; take another run_id"
            )
        due = next_policy(published, policy)
        if due is None:
            return
        topic, producer = settings.kafka.topics.candidates, cluster.producer()
        producer.put(topic, due.run_id.encode(), decoder.codec.encode(due))
        producer.flush()
        producer.close()
        logger().info(
            "policy_published", run=due.run_id, policy=due.policy_version, by=due.published_by
        )
        # Another writer may have taken the version meanwhile: then publish again, with the next.
    raise PolicyRefused(
        f"others set the policy of run {settings.run_id} at the same time, {PUBLISH_ATTEMPTS} times"
    )


def serve(settings: Settings, stop: threading.Event) -> None:
    """Run admission until `stop` is set.

    Raises:
        Fenced: Another admission of the run and channel has started.
    """
    cluster, topics = cluster_of(settings), settings.kafka.topics
    channels = settings.admit.channels
    create_topics(
        cluster, settings, [topics.ready_batches_spec(settings.run_id, c) for c in channels]
    )
    check_access(cluster, settings, "admit")
    metrics = DecisionMetrics(channels)
    with serving_metrics(settings, PROCESS, metrics.registry):
        _admit(settings, cluster, metrics, stop)


def _admit(
    settings: Settings, cluster: Cluster, metrics: DecisionMetrics, stop: threading.Event
) -> None:
    channels, decoder = settings.admit.channels, Decoder(cluster, settings.kafka.topics.schemas)
    admitters = list[ChannelAdmitter]()
    for channel in channels:
        twin = admitters[0] if admitters else None
        admitters.append(ChannelAdmitter(settings, channel, cluster, decoder, twin, metrics))
    publish_policy(settings, cluster, decoder, admitters[0])
    for admitter in admitters:
        admitter.open()
    ready(f"run {settings.run_id}: {', '.join(channels)}")
    busy = False
    while not stop.is_set():
        timeout_s = 0.0 if busy else IDLE_S / len(admitters)
        busy = sum(admitter.step(timeout_s) for admitter in admitters) > 0
    for admitter in admitters:
        admitter.close()


def main(settings: Settings) -> None:
    """Run the process. Exits with code 78 when another admission of the run has taken over."""
    run_sync(PROCESS, settings, serve)
