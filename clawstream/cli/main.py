"""The command line. Imports heavy modules only in commands, so `clawstream --help` is fast."""

from __future__ import annotations

import importlib
import sys
import traceback
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from clawstream.cli import broker, curate, dlq, keys, lineage, policy, replay, spool, tables, topics
from clawstream.cli.common_options import (
    Config,
    Form,
    Overrides,
    cluster_of,
    fail,
    group,
    load,
    plain_errors,
    run,
    settings_of,
)

POSITIONS = ("stream_jobs.lake.positions", "clawstream.ops.job_positions", "trainer.positions")
"""Modules that list what their processes have stored, for `doctor`."""


class Commands(TyperGroup):
    """The commands. An expected error ends a command with one line and the error's exit code."""

    def invoke(self, ctx: Any) -> Any:
        with plain_errors():
            return super().invoke(ctx)


app = typer.Typer(
    name="clawstream",
    cls=Commands,
    help="The data foundation of agentic reinforcement learning, as an event stream.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich alone would double the start-up
    context_settings={"help_option_names": ["-h", "--help"]},
)
jobs = group("Stream jobs.")
app.add_typer(broker.app, name="broker")
app.add_typer(topics.app, name="topics")
app.add_typer(jobs, name="jobs")
app.add_typer(keys.app, name="keys")
app.add_typer(spool.app, name="spool")
app.add_typer(tables.app, name="tables")
app.add_typer(dlq.app, name="dlq")
app.add_typer(lineage.app, name="lineage")
app.add_typer(replay.app, name="replay")
app.add_typer(policy.app, name="policy")
app.add_typer(policy.run_app, name="run")
app.command("curate")(curate.curate)


@app.command()
def up(overrides: Overrides = None, config: Config = None) -> None:
    """Run everything on this machine until Ctrl-C, then stop in order."""
    run("clawstream.ops.up:run", config, overrides)


@app.command()
def status(overrides: Overrides = None, config: Config = None, form: Form = "table") -> None:
    """Show the processes of a data directory, their readiness and the progress of the run.

    Exit code 1 when not all are ready.
    """
    settings = settings_of(config, overrides)
    import json
    from dataclasses import asdict

    from clawstream.ops.status import Status, format_status, processes_of, progress_of
    from runtime.kafka import KafkaError

    supervisor, processes = processes_of(settings.data_dir)
    try:
        progress = progress_of(settings, cluster_of(settings))
    except KafkaError:
        progress = None
    found = Status(settings.data_dir, settings.run_id, supervisor, processes, progress)
    if form == "json":
        typer.echo(
            json.dumps(
                {**asdict(found), "data_dir": str(found.data_dir), "is_up": found.is_up}, indent=1
            )
        )
    else:
        typer.echo(format_status(found))
    if not found.is_up:
        raise SystemExit(1)


@app.command()
def down(
    overrides: Overrides = None,
    config: Config = None,
    wait: Annotated[float, typer.Option(min=0, help="Give up after so many seconds.")] = 600.0,
) -> None:
    """Stop, in order, what `clawstream up` started on a data directory, and wait until it has
    ended.
    """
    directory = settings_of(config, overrides).data_dir
    from clawstream.ops.status import wait_until_down
    from runtime.process.supervisor import ask_to_stop

    pid = ask_to_stop(directory)
    if pid is None:
        typer.echo(f"nothing runs on {directory}")
    elif wait_until_down(directory, wait):
        typer.echo(f"stopped {pid}")
    else:
        fail(
            f"`clawstream up`, pid {pid}, has not ended within {wait:g} s; its log and "
            f"{directory / 'logs'} say what it waits for"
        )


@app.command(context_settings={"ignore_unknown_options": True})
def gateway(overrides: Overrides = None, config: Config = None) -> None:
    """Serve agents: their base_url points here. Takes the flags of Claw-R1's gateway too."""
    run("gateway.main:main", config, load("gateway.claw_r1.flags").overrides_of(overrides or ()))


@jobs.command("assemble")
def jobs_assemble(overrides: Overrides = None, config: Config = None) -> None:
    """Join steps with rewards into trajectories and candidates."""
    run("stream_jobs.assemble.main:main", config, overrides)


@jobs.command("reward")
def jobs_reward(overrides: Overrides = None, config: Config = None) -> None:
    """Compute rule rewards of closed trajectories."""
    run("stream_jobs.reward.main:main", config, overrides)


@app.command()
def admit(overrides: Overrides = None, config: Config = None) -> None:
    """Fold candidates into groups and ready batches."""
    run("stream_jobs.admit.main:main", config, overrides)


@app.command()
def lake(overrides: Overrides = None, config: Config = None) -> None:
    """Write every topic to Delta Lake, each record once."""
    run("stream_jobs.lake.main:main", config, overrides)


@app.command()
def train(overrides: Overrides = None, config: Config = None) -> None:
    """Learn from ready batches and publish weight versions."""
    run("trainer.main:main", config, overrides)


@app.command()
def rollout(overrides: Overrides = None, config: Config = None) -> None:
    """Run vLLM and load each weight version into it without restart."""
    run("rollout.main:main", config, overrides)


@app.command()
def lag(overrides: Overrides = None, config: Config = None) -> None:
    """How far every consumer group is behind, in records."""
    settings = settings_of(config, overrides)
    from clawstream.ops.lag import format_lag
    from clawstream.ops.lag import lag as group_lag

    typer.echo(format_lag(group_lag(cluster_of(settings), settings)))


@app.command()
def doctor(
    overrides: Overrides = None,
    config: Config = None,
    every: Annotated[
        bool, typer.Option("--all", help="A line for every partition, those that fit too.")
    ] = False,
) -> None:
    """Compare stored positions with the topics and look for damaged spools.

    Exit code 1 on a problem.
    """
    settings = settings_of(config, overrides)
    spools = load("clawstream.ops.spool_drain")
    from clawstream.ops.doctor import SERIOUS, examine, format_diagnoses

    cluster = cluster_of(settings)
    found = []
    for name in POSITIONS:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as e:
            if e.name is not None and e.name.partition(".")[0] == name.partition(".")[0]:
                raise
            typer.echo(f"{name} left out: {e.name} is not installed here", err=True)
        else:
            found += module.positions(settings, cluster)
    diagnoses = examine(cluster, found)
    damaged = spools.damaged(settings)
    typer.echo(format_diagnoses(diagnoses, every))
    for found in damaged:
        typer.echo(str(found))
    if damaged or any(d.verdict in SERIOUS for d in diagnoses):
        raise SystemExit(1)


@app.command()
def sql(
    query: Annotated[str, typer.Argument(help="DuckDB SQL over the tables of the lake.")],
    overrides: Overrides = None,
    config: Config = None,
    output: Annotated[
        Literal["table", "json", "csv", "parquet"],
        typer.Option("--format", "-f", help="How to print it."),
    ] = "table",
    at: Annotated[
        str | None,
        typer.Option(
            "--at",
            help="All tables as of a time, a named snapshot, or a file of `tables snapshot`.",
        ),
    ] = None,
) -> None:
    """Ask the lake."""
    with load(
        "clawstream.query.sandbox_launch"
    ).QueryProcess() as worker:  # it starts up while this process reads its settings
        settings = settings_of(config, overrides)
        module = load("clawstream.query.sandbox")
        if output == "parquet" and sys.stdout.isatty():
            fail("parquet is for a file: add `> answer.parquet`", 2)
        module.write_sql(settings, query, sys.stdout.buffer, output, at, worker)
        sys.stdout.buffer.flush()


def main() -> None:
    """Entry point of the console script. A bug ends with its traceback and the exit code of one."""
    try:
        app()
    except Exception:  # noqa: BLE001 - the end of the command, with its traceback
        from runtime.exit_codes import EXIT_CRASH

        traceback.print_exc()
        raise SystemExit(EXIT_CRASH) from None
