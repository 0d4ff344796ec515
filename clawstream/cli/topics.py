"""`clawstream topics`."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from clawstream.cli.common_options import (
    Config,
    Form,
    Overrides,
    cluster_of,
    fail,
    group,
    instant,
    load,
    settings_of,
)

app = group("Kafka topics.")


@app.command("create")
def topics_create(overrides: Overrides = None, config: Config = None) -> None:
    """Make every topic that is not there yet, and announce the schemas."""
    settings = settings_of(config, overrides)
    from runtime.topics.records import create_topics

    made = create_topics(cluster_of(settings), settings)
    typer.echo("\n".join(f"made {name}" for name in made) or "all topics are there")


@app.command("list")
def topics_list(overrides: Overrides = None, config: Config = None) -> None:
    """Topics with their ids, partitions and offsets."""
    settings = settings_of(config, overrides)
    cluster = cluster_of(settings)
    mine = sorted(t for t in cluster.topics() if t.startswith(settings.kafka.topic_prefix + "."))
    ids = cluster.topic_ids(mine)
    for name in mine:
        marks = cluster.watermarks(name)
        kept = sum(high - low for low, high in marks.values())
        typer.echo(f"{name:48} {ids[name]:24} partitions {len(marks):3}  records {kept}")


@app.command("copy")
def topics_copy(
    to_prefix: Annotated[str, typer.Option("--to-prefix", help="Prefix of the copies.")],
    overrides: Overrides = None,
    config: Config = None,
    partitions: Annotated[
        int | None, typer.Option("--partitions", min=1, help="Default: as many as now.")
    ] = None,
    since: Annotated[
        str | None, typer.Option("--since", help="Begin here, as in `clawstream replay run`.")
    ] = None,
    until: Annotated[str | None, typer.Option("--until", help="End before this time.")] = None,
    run: Annotated[str | None, typer.Option("--run", help="Only what is of this run.")] = None,
    as_run: Annotated[
        str | None, typer.Option("--as-run", help="Another run id for the copy.")
    ] = None,
    rewards: Annotated[
        bool, typer.Option("--rewards/--no-rewards", help="Rewards of the reward job too.")
    ] = True,
) -> None:
    """Copy steps, rewards and schemas to another prefix, with their timestamps and ticks."""
    settings = settings_of(config, overrides)
    from clawstream.ops.topics.copy import RecordFilter, copy_topics

    span = instant(since, "--since"), instant(until, "--until")
    if as_run is not None and run is None:
        fail("--as-run needs --run: two runs must not become one", 2)
    record_filter = RecordFilter(run, as_run, rewards)
    done = copy_topics(cluster_of(settings), settings, to_prefix, partitions, *span, record_filter)
    for topic, count in done["records"].items():
        typer.echo(f"{topic:48} records {count}")
    more = f"ticks {done['ticks']}, left out {done['left_out']}, unreadable {done['unreadable']}"
    typer.echo(more + (" (copied before)" if done["was_done"] else ""))
    typer.echo(
        f"jobs on the copy: kafka.topic_prefix={to_prefix} kafka.partitions={done['partitions']} "
        "jobs.write_ticks=false"
    )


@app.command("trim")
def topics_trim(
    overrides: Overrides = None,
    config: Config = None,
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
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do it.")] = False,
    form: Form = "table",
) -> None:
    """Delete candidates and ready batches that no live run needs and the lake has.

    With --before also rewards. Without --yes it only prints the plan.
    """
    settings = settings_of(config, overrides)
    from clawstream.ops.topics.trim import NotGivenUp, TopicTrim, TrimInputs, format_ranges

    before_ms = instant(before, "--before")
    lake, jobs = load("stream_jobs.lake.positions"), load("clawstream.ops.job_positions")
    cluster = cluster_of(settings)
    applied = jobs.rewards_applied(settings, cluster) if before_ms is not None else {}
    kept = TrimInputs(
        lake.offsets_in_lake(settings, cluster), applied, before_ms, frozenset(give_up or ())
    )
    try:
        plan = TopicTrim(cluster, settings, kept)
    except NotGivenUp as e:
        fail(str(e), 2)
    if yes:
        plan.do()
    if form == "json":
        typer.echo(
            json.dumps(
                [
                    {**asdict(trim_range), "removed": yes and trim_range.removes > 0}
                    for trim_range in plan.ranges
                ]
            )
        )
        return
    typer.echo(format_ranges(plan.ranges))
    todo = [trim_range for trim_range in plan.ranges if trim_range.removes]
    what = f"{sum(trim_range.removes for trim_range in todo)} offsets of {len(todo)} partitions"
    if not todo:
        typer.echo("\nnothing can go")
    else:
        typer.echo(
            f"\nremoved {what}" if yes else f"\n{what} would go for ever: say --yes to remove them"
        )
