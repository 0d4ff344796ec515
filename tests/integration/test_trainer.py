"""The trainer on a real Kafka: exactly once along the surviving chain, whichever process is killed.

Other tests cover fencing and invalid input.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from support.ports import free_port
from support.processes import Processes
from support.ready_batches import GROUPS, MEMBERS, Feed
from support.trainer_runs import MemoryWeightLog

from clawstream.runtime.exit_codes import EXIT_FENCED
from clawstream.runtime.kafka import Cluster, SourceTruncated
from clawstream.runtime.process.config import overrides_of
from clawstream.runtime.process.ports import PortTaken
from clawstream.runtime.topics.records import Decoder, create_topics
from clawstream.schemas.errors import SettingsError
from clawstream.schemas.records import (
    DeadLetter,
    WeightVersion,
)
from clawstream.schemas.settings import MetricsSettings, Settings
from clawstream.trainer.data.batches import BatchReader
from clawstream.trainer.errors import BatchesReplaced, BatchGap, PayloadUnreadable
from clawstream.trainer.liveness.watchdog import Watchdog
from clawstream.trainer.main import train
from clawstream.trainer.position import starting_position
from clawstream.trainer.positions import positions
from clawstream.trainer.start import open_run
from clawstream.trainer.step import train_batch
from clawstream.trainer.versions.history import ancestors

NURSERY = """
import json, os, sys
from clawstream.runtime.process.config import load
from clawstream.trainer.main import main
for line in sys.stdin:
    order = json.loads(line)
    if "wait" in order:
        answer = os.waitstatus_to_exitcode(os.waitpid(order["wait"], 0)[1])
    elif not (answer := os.fork()):
        os.dup2(os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
        main(load(overrides=order["words"]))
    print(answer, flush=True)
"""
Eventually = Callable[..., object]


@pytest.fixture
def trained(settings: Settings, model_dir: Path) -> Settings:
    """Return the settings of a trainer of the tiny model."""
    more = settings.trainer.model_copy(
        update={"model_path": model_dir, "device": "cpu", "lr": 1e-3}
    )
    return settings.model_copy(update={"run_id": "r", "trainer": more})


@pytest.fixture
def feed(cluster: Cluster, trained: Settings) -> Iterator[Feed]:
    feed = Feed(cluster, trained)
    yield feed
    feed.producer.close()
    feed.plain.close()


def with_trainer(settings: Settings, **trainer: object) -> Settings:
    return settings.model_copy(update={"trainer": settings.trainer.model_copy(update=trainer)})


def until(settings: Settings, max_versions: int) -> Settings:
    return with_trainer(settings, max_versions=max_versions)


class Nursery:
    """A process that has imported torch once (10 s) and forks trainers.

    Each fork is as real as a trainer started alone.
    """

    def __init__(self) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            [sys.executable, "-c", NURSERY], stdin=pipe, stdout=pipe, text=True
        )

    def _ask(self, **order: object) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(order), file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())

    @contextmanager
    def trainer(self, settings: Settings, log: Path) -> Iterator[int]:
        """Yield the pid of a trainer; kill it at the end of the block."""
        pid = self._ask(words=overrides_of(settings), log=str(log))
        try:
            yield pid
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def wait(self, pid: int) -> int:
        """Wait for the end of a trainer; return its exit code, negative for a signal."""
        return self._ask(wait=pid)

    def close(self) -> None:
        """Close the nursery. Its running children are orphaned; `trainer` kills them."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


def assert_trained_once(feed: Feed, batches: int) -> None:
    """Follow the surviving chain from its head.

    It must contain the batches 0 to n-1, each exactly once, in order, and so must the records of
    its tokens. A version that is not on the log has no tokens there.
    """
    versions = feed.versions()
    assert len({v.version_id for v in versions}) == len(versions), "an id was used twice"
    trained: list[int] = []
    for version in reversed(ancestors(versions, versions[-1].version_id)):
        if version.first_batch_seq is not None and version.last_batch_seq is not None:
            trained += range(version.first_batch_seq, version.last_batch_seq + 1)
    assert trained == list(range(batches))
    tokens, by_id = feed.trained(), {v.version_id: v for v in versions}
    for one in tokens:
        version = by_id[one.version_id]
        assert (version.first_batch_seq or 0) <= one.batch_seq <= (version.last_batch_seq or 0)
    chain = {v.version_id for v in ancestors(versions, versions[-1].version_id)}
    counts = Counter((t.batch_seq, t.step_id) for t in tokens if t.version_id in chain)
    assert len(counts) == batches * GROUPS * MEMBERS * 2 and set(counts.values()) <= {1}


def test_batches_become_versions_and_the_lag_reaches_zero(
    feed: Feed, trained: Settings, eventually: Eventually, tmp_path: Path
) -> None:
    feed.write(feed.refused(), b"no record", feed.batch(0), feed.refused())
    stop, events = threading.Event(), tmp_path / "tensorboard"
    monitored = trained.trainer.model_copy(update={"tensorboard_dir": events})
    given = trained.model_copy(update={"trainer": monitored})
    thread = threading.Thread(target=train, args=(given, stop))
    thread.start()
    try:
        eventually(lambda: feed.ids() == ["0.0", "1.0"])
        feed.write_validation(feed.batch(0))
        eventually(lambda: any(b"val/reward_mean" in f.read_bytes() for f in events.rglob("*.*")))
        feed.write(feed.batch(1), feed.refused(), feed.batch(2))
        eventually(lambda: feed.ids() == ["0.0", "1.0", "2.0", "3.0"])
        eventually(lambda: feed.lag() == 0)
        feed.write(feed.refused())
        eventually(lambda: feed.lag() == 0)
    finally:
        stop.set()
        thread.join()
    versions = feed.versions()
    assert_trained_once(feed, 3)
    assert versions[1].metrics["groups"] == GROUPS
    assert versions[1].metrics["tokens"] == GROUPS * MEMBERS * 4
    assert versions[1].batches_topic_id == feed.cluster.topic_id(feed.topic)
    letters = [
        feed.codec.decode(r.value)
        for r in feed.cluster.read_all(feed.topics.dead_letters, await_open=True)
    ]
    assert [
        (x.topic, x.offset, x.value, x.process, x.reason)
        for x in letters
        if isinstance(x, DeadLetter)
    ] == [(feed.topic, 1, b"no record", "trainer", "undecodable")]


def test_a_start_that_trains_nothing_keeps_the_version_with_the_best_validation(
    feed: Feed, trained: Settings
) -> None:
    create_topics(feed.cluster, trained, [feed.topics.ready_batches_spec("r", "val")])
    feed.write_validation(feed.batch(0))
    feed.write(*(feed.batch(n) for n in range(4)))
    changes = {"keep_versions": 2, "keep_best_by": "val/reward_mean", "max_versions": 4}
    given = trained.model_copy(update={"trainer": trained.trainer.model_copy(update=changes)})
    for _ in range(2):
        train(given, threading.Event())
        kept = sorted(path.name for path in (Path(given.weights_uri) / given.run_id).iterdir())
        assert kept == ["0.0", "3.0", "4.0"]


def test_a_trainer_whose_metrics_port_is_in_use_leaves_the_running_one_alone(
    feed: Feed, trained: Settings, eventually: Eventually
) -> None:
    metrics = MetricsSettings(port=free_port())
    given = trained.model_copy(update={"metrics": metrics})
    stop = threading.Event()
    thread = threading.Thread(target=train, args=(given, stop))
    thread.start()
    try:
        eventually(lambda: feed.ids() == ["0.0"])
        with pytest.raises(PortTaken, match=r"metrics\.port"):
            train(given, threading.Event())
        feed.write(feed.batch(0))
        eventually(lambda: feed.ids() == ["0.0", "1.0"])
    finally:
        stop.set()
        thread.join()


def test_a_gap_is_an_error_that_names_both_numbers(feed: Feed, trained: Settings) -> None:
    feed.write(feed.batch(0))
    train(until(trained, 1), threading.Event())
    feed.write(feed.batch(2))
    with pytest.raises(BatchGap, match=r"batch_seq 2 at offset 2, expected 1"):
        train(trained, threading.Event())
    assert feed.ids() == ["0.0", "1.0"]


def test_a_trainer_set_otherwise_than_its_run_refuses(feed: Feed, trained: Settings) -> None:
    feed.write(feed.batch(0, sync_every=3))
    with pytest.raises(SettingsError, match=r"sync_every=1, but batch 0 .* sync_every=3"):
        train(trained, threading.Event())


def test_payload_that_is_gone_stops_the_trainer(feed: Feed, trained: Settings) -> None:
    batch = feed.batch(0)
    place = batch.groups[0].members[0].place
    feed.write(batch)
    feed.cluster.delete_records(feed.topics.trajectories, place.partition, place.last_offset + 1)
    with pytest.raises(PayloadUnreadable, match="batch 0"):
        train(trained, threading.Event())
    assert feed.ids() == ["0.0"]


def test_payload_of_a_topic_made_anew_stops_the_trainer(feed: Feed, trained: Settings) -> None:
    batch = feed.batch(0)
    member = batch.groups[0].members[0]
    elsewhere = replace(member, place=replace(member.place, topic_id="elsewhere"))
    group = replace(batch.groups[0], members=(elsewhere, *batch.groups[0].members[1:]))
    feed.write(replace(batch, groups=(group, *batch.groups[1:])))
    with pytest.raises(PayloadUnreadable, match="recreated"):
        train(trained, threading.Event())


def test_a_ready_batches_topic_made_anew_stops_a_trainer_that_has_trained(
    feed: Feed, trained: Settings, eventually: Eventually
) -> None:
    feed.write(feed.batch(0), feed.batch(1))
    train(until(trained, 2), threading.Event())
    feed.cluster.delete_topic(feed.topic)
    eventually(lambda: not feed.cluster.topics(feed.topic))
    create_topics(feed.cluster, trained, [feed.topics.ready_batches_spec("r", "train")])
    feed.write(feed.batch(0))
    with pytest.raises(BatchesReplaced, match="batches 0 to 1 of topic id"):
        train(until(trained, 3), threading.Event())
    assert feed.ids() == ["0.0", "1.0", "2.0"]
    errors = [p.error for p in positions(trained, feed.cluster)]
    assert errors[1] is None and errors[0] is not None and "another run_id" in errors[0]


def test_a_topic_that_ends_before_the_position_stops_the_trainer(
    feed: Feed, trained: Settings
) -> None:
    feed.write(feed.batch(0))
    train(until(trained, 1), threading.Event())
    feed.write(feed.batch(1))
    feed.cluster.delete_records(feed.topic, 0, 3)
    with pytest.raises(SourceTruncated, match="position 1"):
        train(trained, threading.Event())


def losses(versions: list[WeightVersion]) -> list[float]:
    """Return the loss of each batch along the surviving chain."""
    chain = reversed(ancestors(versions, versions[-1].version_id))
    return [version.metrics["loss"] for version in chain if version.last_batch_seq is not None]


def ignore(*_: object) -> None:
    """Take the positions or dead letters of a reader."""


def uninterrupted(feed: Feed, settings: Settings) -> list[WeightVersion]:
    """Train the batches on the topic without a break, on a weights log in memory."""
    weight_log, locate = MemoryWeightLog(), partial(starting_position, feed.cluster, feed.topic)
    run = open_run(settings, weight_log, [], set(), locate)
    decoder = Decoder(feed.cluster, feed.topics.schemas)
    reader = BatchReader(
        feed.cluster, settings, decoder, run.position, None, ignore, Watchdog(), ignore
    )
    torch.set_num_threads(settings.trainer.threads)
    while not run.finished:
        fetched = reader.next(run.position.next_batch_seq, 0.2)
        if fetched is not None:
            train_batch(run, fetched)
            run.publish()
    run.end()
    reader.close()
    return weight_log.published


def test_kill_9_at_random_trains_every_batch_exactly_once_with_the_same_losses(
    feed: Feed, trained: Settings, nursery: Nursery, tmp_path: Path, eventually: Eventually
) -> None:
    trained = with_trainer(trained, save_every=3)
    seed = time.time_ns()
    rng, total, log = random.Random(seed), 40, tmp_path / "trainer.log"
    log.touch()
    for kill in range(3):
        # More batches than the goal needs, but only a few more: otherwise a fast trainer finishes
        # before the last kill.
        feed.write(*(feed.batch(seq) for seq in range(13 * kill, 13 * kill + 13)))
        goal = log.read_text().count("version_published") + rng.randrange(1, 8)
        with nursery.trainer(trained, log) as pid:
            eventually(lambda goal=goal: log.read_text().count("version_published") >= goal, 180)
            # The kill hits training, checkpoint, publication or deletion.
            time.sleep(rng.random() * 0.1)
            os.kill(pid, signal.SIGKILL)
            assert nursery.wait(pid) == -signal.SIGKILL, f"seed {seed}: {log.read_text()[-2000:]}"
    feed.write(feed.batch(total - 1))
    with nursery.trainer(until(trained, total), log) as pid:
        assert nursery.wait(pid) == 0, log.read_text()[-2000:]
    versions = feed.versions()
    assert_trained_once(feed, total)
    assert versions[-1].sync_index == total and versions[-1].attempt == 3, f"seed {seed}"
    elsewhere = until(trained, total).model_copy(update={"data_dir": tmp_path / "uninterrupted"})
    assert losses(versions) == losses(uninterrupted(feed, elsewhere)), f"seed {seed}"


def test_a_second_trainer_fences_the_first_and_sigterm_ends_it_clean(
    feed: Feed, trained: Settings, nursery: Nursery, tmp_path: Path, eventually: Eventually
) -> None:
    log = tmp_path / "second.log"
    log.touch()
    with nursery.trainer(trained, tmp_path / "first.log") as first:
        eventually(lambda: feed.ids() == ["0.0"], 180)
        with nursery.trainer(trained, log) as second:
            eventually(lambda: "resumed" in log.read_text(), 180)
            feed.write(feed.batch(0))
            assert nursery.wait(first) == EXIT_FENCED, (tmp_path / "first.log").read_text()[-2000:]
            eventually(lambda: feed.ids() == ["0.0", "1.1"], 180)
            os.kill(second, signal.SIGTERM)
            assert nursery.wait(second) == 0, log.read_text()[-2000:]
    assert_trained_once(feed, 1)


def torchrun(processes: Processes, settings: Settings) -> subprocess.Popen[bytes]:
    """Start `clawstream train` in two processes."""
    python = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    words = ["--standalone", "-m", "clawstream", "train", *overrides_of(settings)]
    return processes.start("torchrun", [*python, *words], env=os.environ | {"OMP_NUM_THREADS": "1"})


@pytest.mark.long
@pytest.mark.parametrize("killed", [0, 1])
def test_two_processes_of_which_one_is_killed_resume_and_train_as_one(
    feed: Feed, trained: Settings, tmp_path: Path, eventually: Eventually, killed: int
) -> None:
    """killed: rank of a process. The other one ends, too, and torchrun with it."""
    feed.write(feed.batch(0), feed.batch(1))
    with Processes(tmp_path / "logs", patience_s=60) as processes:
        first = torchrun(processes, trained)
        eventually(lambda: feed.ids() == ["0.0", "1.0", "2.0"])
        ranks = psutil.Process(first.pid).children(recursive=True)
        (victim,) = (p for p in ranks if p.environ().get("RANK") == str(killed))
        victim.kill()
        assert first.wait(180) == 1, processes.log("torchrun")[-2000:]
        feed.write(feed.batch(2), feed.batch(3))
        assert torchrun(processes, until(trained, 4)).wait(180) == 0, processes.log("torchrun")
    versions = feed.versions()
    assert_trained_once(feed, 4)
    assert versions[-1].attempt == 1
    elsewhere = until(trained, 4).model_copy(update={"data_dir": tmp_path / "one"})
    assert losses(versions) == pytest.approx(losses(uninterrupted(feed, elsewhere)), rel=1e-3)
