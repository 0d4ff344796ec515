"""The command line for users: help, invalid input, a user's own broker, and invalid positions."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from deltalake import CommitProperties, Transaction, write_deltalake
from support.patience import until
from support.ports import free_port
from support.up import ENVIRON, ROOT, call, command

from clawstream.cli.main import app
from clawstream.runtime.exit_codes import EXIT_KAFKA
from clawstream.runtime.kafka import Cluster
from clawstream.runtime.process.config import overrides_of
from clawstream.runtime.topics.records import create_topics
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.ids import Version
from clawstream.schemas.records import AssemblyMarker, Refused, Tick
from clawstream.schemas.settings import Settings
from clawstream.schemas.topics import partition_of
from clawstream.stream_jobs.assemble.changelog import delta
from clawstream.stream_jobs.assemble.state.changes import SourceReplaced
from clawstream.stream_jobs.assemble.state.partition_state import PartitionState
from clawstream.stream_jobs.assemble.state.trajectories import REWARDS, STEPS
from clawstream.stream_jobs.lake.main import Lake
from clawstream.stream_jobs.lake.tables.catalog import catalog
from clawstream.trainer.position import Position
from clawstream.trainer.versions.directory import VersionState, new_directory

CODEC = Codec()
TOPICS = (
    "assembly",
    "budgets",
    "candidates",
    "dead-letters",
    "rewards",
    "runs",
    "schemas",
    "steps",
    "trained-tokens",
    "trajectories",
    "weights",
    "workers",
)


def commands() -> Iterator[tuple[str, ...]]:
    """Yield every command and group as its words."""

    def walk(command: Any, words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        yield words
        if hasattr(command, "list_commands"):
            for name in command.list_commands(None):
                yield from walk(command.get_command(None, name), (*words, name))

    return walk(typer.main.get_command(app), ())


def test_help_imports_nothing_heavy() -> None:
    """Imports take the time: help takes 80 ms without these modules."""
    code = (
        "import sys; from clawstream.cli.main import app\n"
        "try: app(['--help'])\n"
        "finally: print(' '.join(m.partition('.')[0] for m in sys.modules), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    heavy = {
        "pydantic",
        "confluent_kafka",
        "rich",
        "torch",
        "faust",
        "duckdb",
        "pyarrow",
        "yaml",
        "structlog",
        "asyncio",
    }
    assert not heavy & set(done.stderr.split())
    for name in (
        "up",
        "broker",
        "topics",
        "gateway",
        "jobs",
        "admit",
        "lake",
        "train",
        "rollout",
        "lag",
        "sql",
    ):
        assert f"\n  {name} " in done.stdout


def test_every_command_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    found = list(commands())
    assert len(found) > 20
    for words in found:
        with pytest.raises(SystemExit) as end:
            app([*words, "--help"])
        said = capsys.readouterr().out
        assert end.value.code == 0 and "Usage: " in said, words
        usage, summary, *_ = re.split(r"\n\s*\n", said.strip())
        assert len(summary.strip()) > 10, f"{words}: no summary after {usage}"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("lag", "trainer.lrr=1"), "setting trainer.lrr:"),
        (("up", "kafka.partitions=many"), "setting kafka.partitions:"),
        (("train", "trainer.save_every=0"), "setting trainer.save_every:"),
        (("gateway", "gateway"), "settings are written a.b=c"),
        (("admit", "--config", "/nowhere.yaml"), "/nowhere.yaml"),
        (("sql", "select 1", "lake.url=x"), "setting lake.url:"),
        (("sql", "-f", "xml", "select 1"), "'xml'"),
        (("sql", "select", "1"), "one query, in quotes"),
        (("jobs", "dance"), "dance"),
    ],
)
def test_wrong_words_end_with_2_and_are_named(words: tuple[str, ...], said: str) -> None:
    done = call(*words)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr and "Traceback" not in done.stderr


def test_sql_says_what_is_wrong_in_a_line(tmp_path: Path) -> None:
    data = f"data_dir={tmp_path}"
    done = call("sql", "select 1", data)
    assert (done.returncode, done.stderr) == (
        1,
        f"clawstream: no lake at {tmp_path}/lake: run `clawstream lake` or `clawstream up` first\n",
    )
    Lake(str(tmp_path / "lake"), {}, 10).acquire()
    for query, said in (
        ("selec 1", "syntax error"),
        ("select * from nothing", "nothing"),
        ("select * from read_csv('/etc/passwd')", "disabled"),
    ):
        done = call("sql", query, data)
        assert done.returncode == 1 and said in done.stderr and "Traceback" not in done.stderr
    query = "select count(*) as n from steps where step_id='x=1'"
    for order in ((query, data), (data, query)):
        done = call("sql", *order, "--format", "json")
        assert (done.returncode, json.loads(done.stdout)) == (0, [{"n": 0}])


def test_without_a_broker_they_say_so_soon(tmp_path: Path) -> None:
    words = (f"broker.port={free_port()}", f"data_dir={tmp_path}")
    asked = [
        subprocess.Popen(
            command(*c, *words), cwd=ROOT, env=ENVIRON, stderr=subprocess.PIPE, text=True
        )
        for c in (("lag",), ("topics", "list"), ("topics", "create"))
    ]
    for process in asked:
        _, said = process.communicate(timeout=240)
        assert process.returncode == EXIT_KAFKA
        assert (
            "no Kafka answers at 127.0.0.1:" in said
            and "clawstream broker run" in said
            and "Traceback" not in said
        )


def test_a_broker_of_ones_own(tmp_path: Path) -> None:
    words = (f"data_dir={tmp_path}", f"broker.port={free_port()}", "kafka.partitions=3")
    status = call("broker", "status", *words)
    assert status.returncode == 1 and "no broker is ready" in status.stderr
    with subprocess.Popen(command("broker", "run", *words), cwd=ROOT, env=ENVIRON) as running:
        try:
            until(lambda: call("broker", "status", *words).returncode == 0, "a broker that serves")
            status = call("broker", "status", *words)
            assert "node 1: 127.0.0.1:" in status.stdout and status.stdout.strip().endswith("ready")

            made = call("topics", "create", *words)
            assert made.returncode == 0 and "made claw.steps" in made.stdout.splitlines()
            assert call("topics", "create", *words).stdout == "all topics are there\n"
            listed = call("topics", "list", *words).stdout.splitlines()
            assert [line.split()[0] for line in listed] == [f"claw.{name}" for name in TOPICS]
            (steps,) = (line for line in listed if line.startswith("claw.steps "))
            assert steps.split()[2:] == ["partitions", "3", "records", "0"]

            shown = call("lag", *words)
            assert shown.returncode == 0
            groups = {line.split()[0] for line in shown.stdout.splitlines()[1:]}
            assert {
                "claw-assemble",
                "claw-reward",
                "claw-lake",
                "claw-admit.default.train",
            } <= groups
            told = call("status", "--positions", *words)
            assert told.returncode == 0 and told.stdout.splitlines()[-1] == "no problem", (
                told.stdout
            )
            assert "no process has stored a position yet" in told.stdout
        finally:
            running.terminate()
        assert running.wait(60) == 0
    assert call("broker", "status", *words).returncode == 1


def rows_of(told: subprocess.CompletedProcess[str]) -> dict[tuple[str, str], tuple[str, ...]]:
    """Parse a table with one row for each key.

    Returns:
        (process, kept in) to (topic, partition, position, log, verdict).
    """
    out: dict[tuple[str, str], tuple[str, ...]] = {}
    for line in told.stdout.partition("VERDICT\n")[2].splitlines():
        if not line:
            break
        process, kept, topic, _, _, partition, position, log, verdict = (
            c for c in line.split("  ") if c.strip()
        )
        out[process, kept.strip()] = (
            topic.strip(),
            partition.strip(),
            position.strip(),
            log.strip(),
            verdict.strip(),
        )
    return out


def test_status_finds_every_position_and_judges_it(settings: Settings, cluster: Cluster) -> None:
    journals = [
        settings.kafka.topics.ready_batches_spec("r", channel) for channel in ("train", "val")
    ]
    create_topics(cluster, settings, journals)
    topics, lake = settings.kafka.topics, settings.lake_uri
    producer, partition = cluster.producer(), partition_of(b"r", 4)
    # admission: position 2 of its partition, of which 3 records are left after offset 6
    for number in range(9):
        producer.put(
            topics.candidates,
            None,
            CODEC.encode(Tick(partition=number % 4, event_time=1)),
            partition=partition,
        )
    refused = Refused(
        run_id="r", channel="train", group_id="g", trajectory_ids=(), revisions=(),
        whole_group=True, reason="stale", n=1, input_topic_id=cluster.topic_id(topics.candidates),
        input_from=2, input_to=7,
    )  # fmt: skip
    producer.put(topics.ready_batches("r", "train"), b"r", CODEC.encode(refused))
    producer.put(topics.ready_batches("r", "val"), b"r", b"no decision")
    # assemble: partition 1 has applied nothing yet, another writer has written to partition 2
    inputs = [cluster.topic_id(topics.steps), cluster.topic_id(topics.rewards)]
    entries = [
        SourceReplaced(STEPS, inputs[0], -1),
        SourceReplaced(REWARDS, inputs[1], -1),
    ]
    marker = AssemblyMarker(worker="0", steps_topic_id="s", rewards_topic_id="r", created_at=0)
    producer.put(topics.assembly, None, CODEC.encode(marker), partition=1)
    producer.put(
        topics.assembly, None, CODEC.encode(delta(0, 1, PartitionState(), entries)), partition=1
    )
    producer.put(topics.assembly, None, CODEC.encode(marker), partition=2)
    producer.put(topics.assembly, None, b"garbage", partition=2)
    producer.flush()
    producer.close()
    cluster.delete_records(topics.candidates, partition, 6)
    # the lake: a position beyond the end of weights, and one of a deleted rewards topic
    for table, mark in (
        (f"weights:{cluster.topic_id(topics.weights)}:0", 5),
        ("rewards:former-id-of-rewards:3", 7),
    ):
        name = table.partition(":")[0]
        write_deltalake(
            f"{lake}/{name}",
            catalog()[name].arrow([]),
            commit_properties=CommitProperties(app_transactions=[Transaction(table, mark)]),
        )
    # the trainer: a checkpoint that fits
    here = Position(
        topic_id=cluster.topic_id(topics.ready_batches("r", "train")),
        next_offset=1,
        next_batch_seq=1,
    )
    version = VersionState(
        version=Version("r", 1, 0), parent_version=None,
        weights_topic_id=cluster.topic_id(topics.weights), position=here,
    )  # fmt: skip
    with new_directory(settings.checkpoint_dir, version):
        pass

    told = call("status", "--positions", *overrides_of(settings))
    assert told.returncode == 1 and "Traceback" not in told.stderr, told.stderr
    found = rows_of(told)
    assert found == {
        ("lake", "table rewards"): (topics.rewards, "3", "7", "0..0", "topic recreated"),
        ("lake", "table weights"): (topics.weights, "0", "5", "0..0", "beyond the end"),
        ("admit", "r.train undecided from"): (
            topics.candidates,
            str(partition),
            "2",
            "6..9",
            "before the start",
        ),
        ("admit", "r.train decided to"): (topics.candidates, str(partition), "7", "6..9", "ok"),
        ("admit", "unreadable journal"): (
            topics.ready_batches("r", "val"),
            "0",
            "0",
            "0..1",
            "unreadable",
        ),
        ("assemble", "changelog"): (topics.steps, "1", "0", "0..0", "ok"),
        ("assemble", "unreadable changelog"): (topics.assembly, "2", "1", "0..2", "unreadable"),
        ("trainer", "checkpoint r/1.0"): (
            topics.ready_batches("r", "train"),
            "0",
            "1",
            "0..1",
            "ok",
        ),
        ("trainer", "checkpoint r/1.0 is on"): (topics.weights, "0", "0", "0..0", "ok"),
    }
    for problem in (
        f"beyond the end: lake, table weights, {topics.weights}-0",
        f"{topics.weights} has lost records that lake has read",
        f"{topics.candidates} has lost records that admit has not read",
        f"topic recreated: nothing: lake reads the new {topics.rewards} from its start",
        f"changelog {topics.assembly}-2, offset 1: 7 bytes",
    ):
        assert problem in told.stdout, problem
