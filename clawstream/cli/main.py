"""The command line. Imports heavy modules only in commands, so `clawstream --help` is fast."""

from __future__ import annotations

import importlib
import re
import sys
import traceback
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from clawstream.cli.common_options import (
    Config,
    Form,
    Overrides,
    cluster_of,
    command,
    fail,
    group,
    lake_state,
    load,
    plain_errors,
    print_json,
    run,
    settings_of,
)
from clawstream.cli.lake.curate import curate
from clawstream.cli.lake.export import export
from clawstream.cli.lake.inspect import inspect
from clawstream.cli.train import save_model, train

if TYPE_CHECKING:
    from clawstream.runtime.kafka import Cluster
    from clawstream.runtime.topics.positions import StoredPosition
    from clawstream.schemas.settings import Settings

POSITIONS = (
    "clawstream.stream_jobs.lake.positions",
    "clawstream.ops.job_positions",
    "clawstream.trainer.positions",
)
"""Modules that list the stored positions of their processes, for `doctor`."""
GROUPS = {
    "broker": ("clawstream.cli.broker:app", "The embedded Apache Kafka."),
    "topics": ("clawstream.cli.topics:app", "Kafka topics."),
    "keys": ("clawstream.cli.keys:app", "API keys of the gateway."),
    "spool": ("clawstream.cli.spool:app", "Records that gateways could not send."),
    "tables": ("clawstream.cli.lake.tables:app", "The tables of the lake."),
    "dlq": (
        "clawstream.cli.dlq:app",
        "Dead letters: records that a process could not handle.",
    ),
    "flow": (
        "clawstream.cli.flow:app",
        "Rollouts: play tasks by a Python flow, or by any agent's command line.",
    ),
    "lineage": (
        "clawstream.cli.lake.lineage:app",
        "What a weight version was trained on, and which versions were trained on a step.",
    ),
    "replay": (
        "clawstream.cli.replay:app",
        "Process recorded data again, with other rewards, policy or code. Only reads live topics.",
    ),
    "policy": (
        "clawstream.cli.policy:app",
        "How a run's trajectories become batches; it may change during the run.",
    ),
    "run": ("clawstream.cli.policy:run_app", "The end of a run."),
}
"""Each group of commands: where it is, imported when one of its commands is used, and its help."""


class Commands(TyperGroup):
    """The commands. An expected error ends a command with one line and the error's exit code."""

    def invoke(self, ctx: Any) -> Any:
        with plain_errors():
            return super().invoke(ctx)


class ImportedGroup(TyperGroup):
    """A group of `GROUPS`, which knows only its name and help until it is used."""

    def list_commands(self, ctx: Any) -> list[str]:
        return self._imported().list_commands(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return self._imported().get_command(ctx, cmd_name)

    def _imported(self) -> TyperGroup:
        module, _, name = GROUPS[self.name or ""][0].partition(":")
        return typer.main.get_group(getattr(load(module), name))


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
app.add_typer(jobs, name="jobs")
for _name, (_, _help) in GROUPS.items():
    app.add_typer(group(_help), name=_name, cls=ImportedGroup)


def process(
    app: typer.Typer, name: str, target: str, help_text: str, check: str | None = None
) -> None:
    """Add the command that runs a process.

    target, check: `module:function`, called with the settings. check: Called before the target.
    """

    def call(overrides: Overrides = None, config: Config = None) -> None:
        run(target, config, overrides, check)

    app.command(name, help=help_text)(call)


process(app, "up", "clawstream.ops.up:run", "Run everything until Ctrl-C, then stop in order.")
process(jobs, "assemble", "clawstream.stream_jobs.assemble.main:main", "Join steps with rewards.")
process(
    jobs,
    "reward",
    "clawstream.stream_jobs.reward.main:main",
    "Evaluate rules on closed trajectories.",
)
process(
    jobs,
    "compare",
    "clawstream.stream_jobs.compare.main:main",
    "Let judges compare members of groups.",
)
process(
    app,
    "admit",
    "clawstream.stream_jobs.admit.main:main",
    "Fold candidates into ready batches.",
    # Admission publishes the policy, but only the trainer knows the algorithms.
    check="clawstream.trainer.settings_check:check_algorithm",
)
process(
    app, "lake", "clawstream.stream_jobs.lake.main:main", "Write every record to Delta Lake once."
)
app.command("train")(train)
app.command("save-model")(save_model)
process(
    app, "rollout", "clawstream.rollout.main:main", "Run vLLM and load each weight version into it."
)
process(
    app,
    "traces",
    "clawstream.ops.tracing.process:main",
    "Export calls, trajectories and versions as OpenTelemetry spans.",
)
process(
    app,
    "monitor",
    "clawstream.ops.monitoring.exporter:main",
    "Show lag and processes to Prometheus.",
)


@app.command(context_settings={"ignore_unknown_options": True})
def gateway(overrides: Overrides = None, config: Config = None) -> None:
    """Serve agents: their base_url points here. Takes the flags of Claw-R1's gateway too."""
    run(
        "clawstream.gateway.main:main",
        config,
        load("clawstream.gateway.claw_r1.flags").overrides_of(overrides or ()),
    )


@command(app)
def status(settings: Settings, form: Form = "table") -> None:
    """Show the processes of a data directory, their readiness and the progress of the run.

    Exit code 1 when not all are ready, 69 when Kafka does not answer.
    """
    from dataclasses import asdict

    from clawstream.ops.processes import processes_of, suspended_of
    from clawstream.ops.progress import progress_of
    from clawstream.ops.status import Status, format_status
    from clawstream.runtime.kafka import KafkaError

    supervisor, processes = processes_of(settings.data_dir)
    try:
        progress = progress_of(settings, cluster_of(settings))
    except KafkaError:
        progress = None
    suspended = suspended_of(supervisor, processes)
    found = Status(settings.data_dir, settings.run_id, supervisor, processes, progress, suspended)
    if form == "json":
        print_json({**asdict(found), "is_up": found.is_up}, indent=1)
    else:
        typer.echo(format_status(found))
    if not found.is_up:
        raise SystemExit(found.exit_code)


@command(app)
def down(
    settings: Settings,
    wait: Annotated[float, typer.Option(min=0, help="Give up after so many seconds.")] = 600.0,
) -> None:
    """Stop, in order, what `clawstream up` started on a data directory; wait for its end."""
    from clawstream.ops.processes import left_running, wait_until_down
    from clawstream.runtime.process.supervisor import ask_to_stop

    directory = settings.data_dir
    pid = ask_to_stop(directory)
    if pid is None:
        typer.echo(f"nothing runs on {directory}")
    elif wait_until_down(directory, wait):
        if left := left_running(directory):
            fail(
                f"`clawstream up`, pid {pid}, has died before it had stopped {', '.join(left)} in "
                "order: its log says why. They ended with it; the next start goes on where they "
                "were"
            )
        typer.echo(f"stopped {pid}")
    else:
        fail(
            f"`clawstream up`, pid {pid}, has not ended within {wait:g} s; its log and "
            f"{directory / 'logs'} say what it waits for"
        )


@command(app)
def lag(
    settings: Settings,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Repeat until Ctrl-C, with a status.")
    ] = False,
) -> None:
    """How far every consumer group is behind, in records and seconds."""
    import time

    from clawstream.ops.lag import by_topic, format_lag
    from clawstream.ops.lag import lag as group_lag
    from clawstream.ops.monitoring.watch import INTERVAL_S, LagWatch

    cluster = cluster_of(settings)
    if not watch:
        typer.echo(format_lag(group_lag(cluster, settings)))
        return
    watcher = LagWatch(cluster, settings)
    while True:
        table = format_lag(by_topic(watcher.poll(), time.time()))
        if sys.stdout.isatty():
            typer.echo("\x1b[H\x1b[2J", nl=False)
        typer.echo(f"{time.strftime('%H:%M:%S')}\n{table}\n")
        time.sleep(INTERVAL_S)


@command(app)
def doctor(
    settings: Settings,
    every: Annotated[
        bool, typer.Option("--all", help="A line for every partition, also without a problem.")
    ] = False,
) -> None:
    """Look for positions that do not fit the topics, stalled consumers, processes that are down or
    suspended, and damaged spools.

    Exit code 1 on a problem.
    """
    spools = load("clawstream.ops.spool_drain")
    from clawstream.ops.monitoring.watch import process_problems, watch_for_stalled
    from clawstream.ops.position_check import SERIOUS, examine, format_diagnoses
    from clawstream.ops.processes import processes_of

    _, processes = processes_of(settings.data_dir)
    problems = [*process_problems(processes, settings)]
    for problem in problems:  # before Kafka is asked: its broker may be one of these processes
        typer.echo(problem)
    cluster = cluster_of(settings)
    diagnoses = examine(cluster, _stored_positions(settings, cluster))
    typer.echo(format_diagnoses(diagnoses, every))
    others = [
        *map(str, watch_for_stalled(cluster, settings, processes)),
        *map(str, spools.damaged(settings)),
    ]
    for problem in others:
        typer.echo(problem)
    problems += others
    if problems or any(d.verdict in SERIOUS for d in diagnoses):
        raise SystemExit(1)


def _stored_positions(settings: Settings, cluster: Cluster) -> list[StoredPosition]:
    """Return the positions of all processes whose libraries are installed here."""
    found = []
    for name in POSITIONS:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as e:
            if (e.name or "").partition(".")[0] == name.partition(".")[0]:
                raise
            typer.echo(f"{name} left out: {e.name} is not installed here", err=True)
        else:
            found += module.positions(settings, cluster)
    return found


@command(app, at=lake_state)
def sql(
    query: Annotated[str, typer.Argument(help="DuckDB SQL over the tables of the lake.")],
    overrides: Overrides = None,
    config: Config = None,
    output: Annotated[
        Literal["table", "json", "csv", "parquet"],
        typer.Option("--format", "-f", help="How to print it."),
    ] = "table",
    at: str | None = None,
) -> None:
    """Query the lake."""
    words = [query, *(overrides or ())]  # settings may stand before the query, which may have "="
    overrides = [word for word in words if re.match(r"[a-z][a-z0-9_.]*=", word)]
    queries = [word for word in words if word not in overrides]
    if len(queries) != 1:
        fail("sql takes one query, in quotes", 2)
    # The query process starts up while this process reads its settings.
    with load("clawstream.query.sandbox_launch").query_process() as worker:
        settings = settings_of(config, overrides)
        module = load("clawstream.query.sandbox")
        if output == "parquet" and sys.stdout.isatty():
            fail("parquet is for a file: add `> answer.parquet`", 2)
        module.write_sql(settings, queries[0], sys.stdout.buffer, output, at, worker)
        sys.stdout.buffer.flush()


command(app)(curate)
command(app, at=lake_state)(export)
app.command()(inspect)


def main() -> None:
    """Entry point of the console script. A bug ends with its traceback and the exit code of one."""
    try:
        app()
    except Exception:  # noqa: BLE001 - the end of the command, with its traceback
        from clawstream.runtime.exit_codes import EXIT_CRASH

        traceback.print_exc()
        raise SystemExit(EXIT_CRASH) from None
