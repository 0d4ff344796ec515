"""The command line. Imports nothing heavy until a command runs: `clawstream --help` answers at once."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer

if TYPE_CHECKING:
    from runtime.kafka import Cluster
    from schemas.settings import Settings

PATIENCE_S = 5.0
"""How long a command that a person waits for looks for Kafka."""
POSITIONS = ("stream_jobs.lake_positions", "stream_jobs.job_positions", "trainer.positions")
"""Modules that list what their processes have stored, for `doctor`."""

Words = Annotated[list[str] | None, typer.Argument(metavar="[a.b=c]...", help="Settings, e.g. trainer.lr=1e-6.")]
Config = Annotated[Path | None, typer.Option("--config", "-c", help="YAML file with settings.")]

app = typer.Typer(
    name="clawstream",
    help="The data foundation of agentic reinforcement learning, as an event stream.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich alone would double the start-up
    context_settings={"help_option_names": ["-h", "--help"]},
)
Nodes = Annotated[int | None, typer.Option("--nodes", help="1, 3 or 5: the same as broker.nodes=N.")]
broker_app = typer.Typer(help="The embedded Apache Kafka.", no_args_is_help=True, rich_markup_mode=None)
topics_app = typer.Typer(help="Kafka topics.", no_args_is_help=True, rich_markup_mode=None)
jobs_app = typer.Typer(help="Stream jobs.", no_args_is_help=True, rich_markup_mode=None)
keys_app = typer.Typer(help="API keys of the gateway.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(broker_app, name="broker")
app.add_typer(topics_app, name="topics")
app.add_typer(jobs_app, name="jobs")
app.add_typer(keys_app, name="keys")
spool_app = typer.Typer(help="What gateways could not send.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(spool_app, name="spool")


def _settings(config: Path | None, words: list[str] | None) -> Settings:
    from runtime.config import load
    from schemas.errors import SettingsError

    try:
        return load(config, words or ())
    except SettingsError as e:
        _fail(str(e), 2)


def _fail(message: str, code: int = 1) -> NoReturn:
    sys.stderr.write(f"clawstream: {message}\n")
    raise SystemExit(code)


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Errors that a user can do something about, as one line without a traceback."""
    from runtime.errors import PlumbingError

    try:
        yield
    except PlumbingError as e:
        _fail(str(e))


def _cluster(settings: Settings) -> Cluster:
    """The cluster of the settings, which answers. Raises Unavailable soon when it does not."""
    from runtime.records import cluster_of

    cluster = cluster_of(settings)
    cluster.ask(PATIENCE_S)
    return cluster


def _load(module: str) -> ModuleType:
    """A module of a process, by name, so that no process imports another. Ends with what to install when a library is missing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as e:
        if e.name is not None and e.name.partition(".")[0] == module.partition(".")[0]:
            raise
        _fail(f"{module} needs the package {e.name}, which is not installed: see docs/install.md")


def _run(target: str, config: Path | None, words: list[str] | None) -> None:
    """Call `module:function` with the settings."""
    settings = _settings(config, words)
    module, _, function = target.partition(":")
    getattr(_load(module), function)(settings)


@app.command()
def up(words: Words = None, config: Config = None) -> None:
    """Run everything on this machine until Ctrl-C, then stop in order."""
    _run("runtime.up:run", config, words)


@app.command()
def demo(words: Words = None, config: Config = None) -> None:
    """Make a tiny model, let an agent use it, train it until it has learned the task, and report."""
    _run("demo.main:main", config, words)


@app.command(context_settings={"ignore_unknown_options": True})
def gateway(words: Words = None, config: Config = None) -> None:
    """Serve agents: their base_url points here. Takes the flags of Claw-R1's gateway too."""
    _run("gateway.main:main", config, _load("gateway.seed_flags").words_of(words or ()))


@jobs_app.command("assemble")
def jobs_assemble(words: Words = None, config: Config = None) -> None:
    """Join steps with rewards into trajectories and candidates."""
    _run("stream_jobs.app:run_assemble", config, words)


@jobs_app.command("reward")
def jobs_reward(words: Words = None, config: Config = None) -> None:
    """Compute rule rewards of closed trajectories."""
    _run("stream_jobs.app:run_reward", config, words)


@app.command()
def admit(words: Words = None, config: Config = None) -> None:
    """Fold candidates into groups and ready batches."""
    _run("stream_jobs.admission:main", config, words)


@app.command()
def lake(words: Words = None, config: Config = None) -> None:
    """Write every topic to Delta Lake, each record once."""
    _run("stream_jobs.lake:main", config, words)


@app.command()
def train(words: Words = None, config: Config = None) -> None:
    """Learn from ready batches and publish weight versions."""
    _run("trainer.loop:main", config, words)


@app.command()
def rollout(words: Words = None, config: Config = None) -> None:
    """Run vLLM and load each weight version into it without restart."""
    _run("rollout.worker:main", config, words)


@app.command()
def lag(words: Words = None, config: Config = None) -> None:
    """How far every consumer group is behind, in records."""
    settings = _settings(config, words)
    from runtime.lag import format_lag
    from runtime.lag import lag as group_lag

    with _plain_errors():
        typer.echo(format_lag(group_lag(_cluster(settings), settings)))


@app.command()
def doctor(
    words: Words = None,
    config: Config = None,
    every: Annotated[bool, typer.Option("--all", help="A line for every partition, those that fit too.")] = False,
) -> None:
    """Hold every stored position against today's topics; exit code 1 when one does not fit."""
    settings = _settings(config, words)
    from runtime.doctor import SERIOUS, examine, format_diagnoses

    with _plain_errors():
        cluster = _cluster(settings)
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
    typer.echo(format_diagnoses(diagnoses, every))
    if any(d.verdict in SERIOUS for d in diagnoses):
        raise SystemExit(1)


@app.command()
def sql(
    query: Annotated[str, typer.Argument(help="DuckDB SQL over the tables of the lake.")],
    words: Words = None,
    config: Config = None,
    output: Annotated[
        Literal["table", "json", "csv"], typer.Option("--format", "-f", help="How to print it.")
    ] = "table",
) -> None:
    """Ask the lake."""
    settings = _settings(config, words)
    module = _load("stream_jobs.sql")
    try:
        typer.echo(module.run_sql(settings, query, output))
    except module.LakeError as e:
        _fail(str(e))


@topics_app.command("create")
def topics_create(words: Words = None, config: Config = None) -> None:
    """Make every topic that is not there yet, and announce the schemas."""
    settings = _settings(config, words)
    from runtime.records import create_topics

    with _plain_errors():
        made = create_topics(_cluster(settings), settings)
    typer.echo("\n".join(f"made {name}" for name in made) or "all topics are there")


@topics_app.command("list")
def topics_list(words: Words = None, config: Config = None) -> None:
    """Topics with their ids, partitions and offsets."""
    settings = _settings(config, words)
    with _plain_errors():
        cluster = _cluster(settings)
        mine = sorted(t for t in cluster.topics() if t.startswith(settings.kafka.topic_prefix + "."))
        ids = cluster.topic_ids(mine)
        for name in mine:
            marks = cluster.watermarks(name)
            kept = sum(high - low for low, high in marks.values())
            typer.echo(f"{name:48} {ids[name]:24} partitions {len(marks):3}  records {kept}")


def _with_nodes(words: list[str] | None, nodes: int | None) -> list[str]:
    return [*(words or ()), *([f"broker.nodes={nodes}"] if nodes is not None else [])]


@broker_app.command("run")
def broker_run(words: Words = None, config: Config = None, nodes: Nodes = None) -> None:
    """Run the broker in the foreground, for a supervisor or a container."""
    from runtime.broker import run_foreground
    from runtime.telemetry import configure

    settings = _settings(config, _with_nodes(words, nodes))
    configure("broker", settings.log_level)
    with _plain_errors():
        raise SystemExit(run_foreground(settings.broker, settings.broker_dir))


@broker_app.command("start")
def broker_start(words: Words = None, config: Config = None, nodes: Nodes = None) -> None:
    """Start the broker in the background."""
    from runtime.broker import start

    settings = _settings(config, _with_nodes(words, nodes))
    with _plain_errors():
        for node in start(settings.broker, settings.broker_dir):
            typer.echo(f"node {node.node}: 127.0.0.1:{node.port}, pid {node.pid}")


@broker_app.command("stop")
def broker_stop(words: Words = None, config: Config = None) -> None:
    """Stop the broker that was started in the background."""
    from runtime.broker import stop

    settings = _settings(config, words)
    with _plain_errors():
        pids = stop(settings.broker_dir)
    typer.echo(f"stopped {', '.join(map(str, pids))}" if pids else f"no broker runs on {settings.broker_dir}")


@broker_app.command("status")
def broker_status(words: Words = None, config: Config = None) -> None:
    """Which nodes run; exit code 1 when none does."""
    from runtime.broker import status

    settings = _settings(config, words)
    nodes = status(settings.broker_dir)
    for node in nodes:
        typer.echo(
            f"node {node.node}: 127.0.0.1:{node.port}, pid {node.pid or '-'}, {'ready' if node.ready else 'not ready'}"
        )
    if not any(node.ready for node in nodes):
        _fail(f"no broker is ready on {settings.broker_dir}")


def _keys_command(function: str, config: Path | None, words: list[str] | None, **given: object) -> None:
    """Print what a function of the gateway's key commands says; what a user can mend is one line without a traceback."""
    settings = _settings(config, words)
    keys = _load("gateway.key_commands")
    try:
        typer.echo(getattr(keys, function)(settings, **given))
    except keys.GatewayError as e:
        _fail(str(e))


@keys_app.command("create")
def keys_create(
    name: Annotated[str, typer.Option("--name", help="Who or what will use it.")],
    scope: Annotated[list[str], typer.Option("--scope", help="agent, reward, curate or admin; may be repeated.")],
    run: Annotated[str | None, typer.Option("--run", help="The run of everything written with it.")] = None,
    days: Annotated[
        float | None, typer.Option("--days", help="How long it is good for; default: until revoked.")
    ] = None,
    words: Words = None,
    config: Config = None,
) -> None:
    """Make an API key and print it, this once: only its hash is kept."""
    _keys_command("create", config, words, name=name, scopes=scope, run_id=run, days=days)


@keys_app.command("list")
def keys_list(words: Words = None, config: Config = None) -> None:
    """Names, scopes and runs of all API keys."""
    _keys_command("listing", config, words)


@keys_app.command("revoke")
def keys_revoke(
    name: Annotated[str, typer.Argument(help="Its name or id.")], words: Words = None, config: Config = None
) -> None:
    """Forget an API key; gateways refuse it a second later."""
    _keys_command("revoke", config, words, name=name)


@spool_app.command("drain")
def spool_drain(
    words: Words = None,
    config: Config = None,
    gateway_id: Annotated[str | None, typer.Option("--gateway-id", help="Of this gateway only.")] = None,
) -> None:
    """Send what is too old to be sent by itself; each record only if the lake does not have it."""
    settings = _settings(config, words)
    spool, lake = _load("gateway.spool_drain"), _load("stream_jobs.lake_lookup")
    with _plain_errors():
        _cluster(settings)
        try:
            for done in spool.drain(settings, lake.in_lake, lake.check_not_behind, gateway_id):
                runs = ", runs: what it does not hold back it sends by itself" if done.runs else ""
                typer.echo(f"{done.gateway_id}: {done.sent} sent, {done.in_lake} in the lake already{runs}")
        except (spool.GatewayError, lake.LakeError) as e:
            _fail(str(e))


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
