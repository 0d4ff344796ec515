"""The command line. Imports heavy modules only in commands, so `clawstream --help` is fast."""

from __future__ import annotations

import re
import sys
import traceback
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from clawstream.cli.common_options import (
    AsOf,
    Config,
    Form,
    Overrides,
    cluster_of,
    command,
    fail,
    group,
    load,
    plain_errors,
    print_json,
    run,
    settings_of,
)
from clawstream.cli.lake.curate import curate
from clawstream.cli.lake.export import export
from clawstream.cli.lake.inspect import inspect
from clawstream.cli.lake.lineage import lineage
from clawstream.cli.train import save_model, train

if TYPE_CHECKING:
    from clawstream.schemas.settings import Settings

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


@app.command()
def jobs(
    job: Annotated[
        Literal["assemble", "reward", "compare"],
        typer.Argument(metavar="assemble|reward|compare", help="Which one."),
    ],
    overrides: Overrides = None,
    config: Config = None,
) -> None:
    """Join steps with rewards (assemble), evaluate rules on closed trajectories (reward), or let
    judges compare members of groups (compare).
    """
    run(f"clawstream.stream_jobs.{job}.main:main", config, overrides)


@app.command(context_settings={"ignore_unknown_options": True})
def gateway(overrides: Overrides = None, config: Config = None) -> None:
    """Serve agents: their base_url points here. Takes the flags of Claw-R1's gateway too."""
    run(
        "clawstream.gateway.main:main",
        config,
        load("clawstream.gateway.claw_r1.flags").overrides_of(overrides or ()),
    )


@command(app)
def status(
    settings: Settings,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Repeat until Ctrl-C.")] = False,
    positions: Annotated[
        bool,
        typer.Option(
            "--positions",
            help="Compare every stored position with the topics; needs the lake and checkpoints.",
        ),
    ] = False,
    form: Form = "table",
) -> None:
    """Show processes, lag, the progress of the run, and each problem with its remedy.

    A consumer that does not read is a problem after 15 s. Exit code 1 on a problem, 69 when Kafka
    does not answer.
    """
    import time

    from clawstream.ops.monitoring.watch import INTERVAL_S
    from clawstream.ops.status import Watch, format_status
    from clawstream.runtime.topics.records import cluster_of as connect

    watcher = Watch(settings, connect(settings))
    while True:
        taken = watcher.take(until_judged=not watch, with_positions=positions)
        if watch and sys.stdout.isatty():
            typer.echo("\x1b[H\x1b[2J", nl=False)
        if form == "json":
            print_json(taken.as_dict())
        else:
            typer.echo(f"{time.strftime('%H:%M:%S')}\n" if watch else "", nl=False)
            typer.echo(format_status(taken))
        if not watch:
            raise SystemExit(taken.exit_code)
        time.sleep(INTERVAL_S)


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
def lag(settings: Settings) -> None:
    """How far every consumer group is behind, in records and seconds."""
    from clawstream.ops.lag import format_lag
    from clawstream.ops.lag import lag as group_lag

    typer.echo(format_lag(group_lag(cluster_of(settings), settings)))


@app.command()
def sql(
    query: Annotated[str, typer.Argument(help="DuckDB SQL over the tables of the lake.")],
    overrides: Overrides = None,
    config: Config = None,
    output: Annotated[
        Literal["table", "json", "csv", "parquet"],
        typer.Option("--format", "-f", help="How to print it."),
    ] = "table",
    at: AsOf = None,
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
command(app)(lineage)
command(app)(export)
app.command()(inspect)


def main() -> None:
    """Entry point of the console script. A bug ends with its traceback and the exit code of one."""
    try:
        app()
    except Exception:  # noqa: BLE001 - the end of the command, with its traceback
        from clawstream.runtime.exit_codes import EXIT_CRASH

        traceback.print_exc()
        raise SystemExit(EXIT_CRASH) from None
