"""`clawstream topics`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from clawstream.cli.common_options import (
    Form,
    Yes,
    cluster_of,
    command,
    fail,
    group,
    instant,
    load,
    print_json,
)
from clawstream.ops.topics.trim import NotGivenUp, TopicTrim, TrimInputs, format_ranges
from clawstream.runtime.topics.access import PROCESSES, grant_commands
from clawstream.runtime.topics.records import create_topics
from clawstream.schemas.settings import Settings

app = group()


@command(app, "create")
def topics_create(settings: Settings) -> None:
    """Make every topic that is not there yet, and announce the schemas."""
    made = create_topics(cluster_of(settings), settings)
    typer.echo("\n".join(f"made {name}" for name in made) or "all topics are there")


@command(app, "list")
def topics_list(settings: Settings) -> None:
    """Topics with their ids, partitions and offsets."""
    cluster = cluster_of(settings)
    mine = sorted(t for t in cluster.topics() if t.startswith(settings.kafka.topic_prefix + "."))
    ids = cluster.topic_ids(mine)
    for name in mine:
        marks = cluster.watermarks(name)
        kept = sum(high - low for low, high in marks.values())
        typer.echo(f"{name:48} {ids[name]:24} partitions {len(marks):3}  records {kept}")


@command(app, "acls")
def topics_acls(
    process: Annotated[str, typer.Argument(metavar="PROCESS", help=f"{', '.join(PROCESSES)}.")],
    settings: Settings,
    user: Annotated[
        str | None,
        typer.Option(
            "--user", help="The login, default: as the process. With certificates: CN=NAME."
        ),
    ] = None,
) -> None:
    """Print the arguments of `kafka-acls` that grant a process what it needs."""
    if process not in PROCESSES:
        fail(f"{process} is none of {', '.join(PROCESSES)}", 2)
    if user is None and settings.kafka.security.protocol == "ssl":
        fail("--user is needed: brokers name the user as the certificate, such as CN=gateway", 2)
    for line in grant_commands(process, settings.kafka.topic_prefix, user or process):
        typer.echo(f"kafka-acls --bootstrap-server {settings.bootstrap_servers} {line}")


@command(app, "trim")
def topics_trim(
    settings: Settings,
    before: Annotated[
        str | None,
        typer.Option("--before", help="Only what came before this time, e.g. 60d; rewards too."),
    ] = None,
    give_up: Annotated[
        list[str] | None,
        typer.Option(
            "--give-up",
            metavar="RUN",
            help="Nobody wants the rest of this run: batches not trained, nothing decided, no "
            "policy.",
        ),
    ] = None,
    yes: Yes = False,
    form: Form = "table",
) -> None:
    """Delete candidates and ready batches that no live run needs and the lake has.

    With --before also rewards. Without --yes it only prints the plan.
    """
    before_ms = instant(before, "--before")
    lake, jobs = load("clawstream.stream_jobs.lake.positions"), load("clawstream.ops.job_positions")
    trainer = load("clawstream.trainer.positions")
    cluster = cluster_of(settings)
    applied = jobs.rewards_applied(settings, cluster) if before_ms is not None else {}
    kept = TrimInputs(
        lake.offsets_in_lake(settings, cluster),
        applied,
        before_ms,
        frozenset(give_up or ()),
        trainer.resumes(settings, cluster),
    )
    try:
        plan = TopicTrim(cluster, settings, kept)
    except NotGivenUp as e:
        fail(str(e), 2)
    if yes:
        plan.do()
    if form == "json":
        print_json([{**asdict(r), "removed": yes and r.removes > 0} for r in plan.ranges])
        return
    typer.echo(format_ranges(plan.ranges))
    todo = [r for r in plan.ranges if r.removes]
    what = f"{sum(r.removes for r in todo)} offsets of {len(todo)} partitions"
    if not todo:
        typer.echo("\nnothing can be deleted")
    elif yes:
        typer.echo(f"\nremoved {what}")
    else:
        typer.echo(f"\n{what} would be deleted permanently: add --yes to delete them")
