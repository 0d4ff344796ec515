"""`clawstream replay`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from clawstream.cli.common_options import (
    Config,
    Overrides,
    cluster_of,
    fail,
    group,
    instant,
    load,
    settings_of,
)

if TYPE_CHECKING:
    from schemas.settings import Settings

app = group(
    "Recorded data again: with other rewards, another policy, other code. Live topics are only "
    "read."
)

REASONS = 3
"""Most frequent reasons of missing rewards that a report shows."""

Name = Annotated[
    str, typer.Argument(help="What to call the replay: its topics begin with replay-NAME.")
]
Since = Annotated[
    str | None,
    typer.Option("--since", help="Begin here: 2026-11-22T08:00 (UTC), ms since the epoch, 2h, 7d."),
]
Until = Annotated[
    str | None,
    typer.Option("--until", help="End before this time; default: all that there is now."),
]
Channel = Annotated[Literal["train", "val"], typer.Option("--channel", help="Of this channel.")]
Format = Annotated[Literal["text", "json"], typer.Option("--format", "-f", help="How to print it.")]


@app.command("run")
def replay_run(
    name: Name,
    overrides: Overrides = None,
    config: Config = None,
    source: Annotated[
        Literal["topics", "lake"], typer.Option("--from", help="Where the recorded data is.")
    ] = "topics",
    at: Annotated[
        str | None,
        typer.Option(
            "--at", help="The lake as of a time, a named snapshot, or a file of `tables snapshot`."
        ),
    ] = None,
    since: Since = None,
    until: Until = None,
    as_run: Annotated[
        str | None, typer.Option("--as-run", help="Another run id for what comes out.")
    ] = None,
    keep_rules: Annotated[
        bool, typer.Option("--keep-rules", help="Ask no rule: their recorded answers count.")
    ] = False,
    with_steps: Annotated[
        bool, typer.Option("--with-steps", help="Copy the steps too, for a lake of its own.")
    ] = False,
    stay_open: Annotated[
        bool, typer.Option("--stay-open", help="Do not end the run: what waits stays undecided.")
    ] = False,
    output: Format = "text",
) -> None:
    """Process a recorded run again through assemble, reward and admit, with other settings if
    given.
    """
    settings = settings_of(config, overrides)
    if at is not None and source != "lake":
        fail("--at needs --from lake", 2)
    span = instant(since, "--since"), instant(until, "--until")
    module = load("clawstream.ops.replay.run")
    from runtime.logs import configure

    configure("replay", settings.log_level)
    cluster_of(settings)
    request = module.ReplayRequest(
        name,
        _table_versions(settings, source, at),
        *span,
        as_run,
        keep_rules,
        with_steps,
        stay_open,
    )
    report = module.run_replay(settings, request)
    typer.echo(json.dumps(report, indent=1) if output == "json" else _report(settings, report))


def _table_versions(settings: Settings, source: str, at: str | None) -> Any:
    """Return versions of the lake's tables ({}: current ones), or None for topics."""
    if source == "topics":
        return None
    return (
        {}
        if at is None
        else load("stream_jobs.lake.delta.snapshots").resolve_versions(settings, at)
    )


def _report(settings: Settings, report: dict[str, Any]) -> str:
    ended = (
        ", ".join(f"{n} {outcome}" for outcome, n in sorted(report["trajectories"].items()))
        or "none"
    )
    lines = [
        f"replay {report['name']} of run {settings.run_id}"
        + (" (done before)" if report["was_done"] else ""),
        f"steps {report['steps']}, rewards {report['rewards']}, answers of rules "
        f"{report['answers']}",
        f"trajectories: {ended}; still open {report['open']}",
    ]
    no_rewards = sorted(report["no_rewards"].items(), key=lambda item: -item[1])
    lines += [f"  no reward {count} times: {reason}" for reason, count in no_rewards[:REASONS]]
    for channel, said in report["channels"].items():
        lines += _channel(channel, said)
    lines.append(
        f"{report['steps_per_s']:g} steps/s; assemble {report['assemble_s']:g} s, admit "
        f"{report['admit_s']:g} s"
    )
    lines.append(
        "go on with: --config "
        f"{settings.data_dir.absolute() / 'replays' / report['name'] / 'settings.yaml'}"
    )
    return "\n".join(lines)


def _channel(channel: str, said: dict[str, Any]) -> list[str]:
    refused = ", ".join(f"{n} {reason}" for reason, n in sorted(said["refused"].items())) or "none"
    lines = [
        f"{channel}: {len(said['batches'])} batches; refused: {refused}; late revisions "
        f"{said['late']}"
    ]
    return lines + [
        f"  batch {b['batch_seq']:4}  {b['groups']:4} groups {b['trajectories']:5} trajectories "
        f"{b['trainable_tokens']:8} tokens  {b['content_hash'][:16]}"
        for b in said["batches"]
    ]


@app.command("check")
def replay_check(
    overrides: Overrides = None,
    config: Config = None,
    channel: Channel = "train",
    output: Format = "text",
) -> None:
    """Check that the recorded candidates and policies give the recorded batches.

    Else exit code 1.
    """
    _fold("check", config, overrides, channel, output)


@app.command("what-if")
def replay_what_if(
    overrides: Overrides = None,
    config: Config = None,
    channel: Channel = "train",
    output: Format = "text",
) -> None:
    """Show the batches that the recorded candidates would give under the policy of the settings."""
    _fold("what_if", config, overrides, channel, output)


def _fold(
    what: str, config: Path | None, overrides: list[str] | None, channel: str, output: str
) -> None:
    settings = settings_of(config, overrides)
    module = load("clawstream.ops.replay.verify")
    cluster_of(settings)
    report = getattr(module, what)(settings, channel)
    if output == "json":
        typer.echo(json.dumps(report, indent=1))
    else:
        typer.echo(f"run {report['run']}: {report['candidates']} candidates")
        for title in ("recorded", "replayed"):
            typer.echo("\n".join([title, *_channel(channel, report[title])]))
        if report.get("not_checked"):
            typer.echo(f"{report['not_checked']} batches are of a candidates topic that is no more")
    difference = report.get("first_difference")
    if difference is not None:
        if output == "text":
            typer.echo(f"first difference: {json.dumps(difference)}")
        raise SystemExit(1)
    if what == "check" and output == "text":
        typer.echo(f"all {report['batches']} batches came again, in order")


@app.command("list")
def replay_list(overrides: Overrides = None, config: Config = None) -> None:
    """The replays of this data directory."""
    settings = settings_of(config, overrides)
    for found in load("clawstream.ops.replay.run").list_replays(settings):
        result = found["result"]
        state = (
            "not done"
            if result is None
            else f"{sum(len(c['batches']) for c in result['channels'].values())} batches"
        )
        typer.echo(
            f"{found['name']:26} run {found['asked']['run']:16} from {found['plan']['from']:8} "
            f"{state}"
        )


@app.command("delete")
def replay_delete(name: Name, overrides: Overrides = None, config: Config = None) -> None:
    """Delete a replay's topics and its plan; what a trainer or lake has made of it stays."""
    settings = settings_of(config, overrides)
    cluster_of(settings)
    count = load("clawstream.ops.replay.run").delete_replay(settings, name)
    typer.echo(f"deleted {count} topics of replay {name}")
