"""`clawstream replay`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import typer

from clawstream.cli.common_options import (
    AsOf,
    Since,
    Until,
    cluster_of,
    command,
    fail,
    group,
    instant,
    load,
    print_json,
)
from clawstream.ops.replay import run as replays
from clawstream.ops.replay import verify
from clawstream.runtime.logs import configure
from clawstream.schemas.settings import Settings

app = group()

REASONS = 3
"""Most frequent reasons of missing rewards that a report shows."""

Name = Annotated[str, typer.Argument(help="Name of the replay: its topics begin with replay-NAME.")]
Channel = Annotated[Literal["train", "val"], typer.Option("--channel", help="Of this channel.")]
Format = Annotated[Literal["text", "json"], typer.Option("--format", "-f", help="How to print it.")]


@command(app, "run")
def replay_run(
    name: Name,
    settings: Settings,
    source: Annotated[
        Literal["topics", "lake"], typer.Option("--from", help="Where the recorded data is.")
    ] = "topics",
    at: AsOf = None,
    since: Since = None,
    until: Until = None,
    as_run: Annotated[
        str | None, typer.Option("--as-run", help="Another run id for the output.")
    ] = None,
    keep_rules: Annotated[
        bool, typer.Option("--keep-rules", help="Use the recorded answers of rules; run none.")
    ] = False,
    with_steps: Annotated[
        bool, typer.Option("--with-steps", help="Copy the steps too, for a lake of its own.")
    ] = False,
    stay_open: Annotated[
        bool, typer.Option("--stay-open", help="Do not end the run: groups may stay undecided.")
    ] = False,
    where: Annotated[
        str,
        typer.Option("--where", "-w", help="With --from lake: only these trajectories, SQL."),
    ] = "",
    output: Format = "text",
) -> None:
    """Process a recorded run again by assemble, reward and admit, with other settings if given."""
    for option, given in (("--as-of", at), ("--where", where)):
        if given and source != "lake":
            fail(f"{option} needs --from lake", 2)
    span = instant(since, "--since"), instant(until, "--until")
    configure("replay", settings.log_level)
    cluster_of(settings)
    versions = _table_versions(settings, at, where) if source == "lake" else None
    request = replays.ReplayRequest(
        name, versions, *span, as_run, keep_rules, with_steps, stay_open, where
    )
    report = replays.run_replay(settings, request)
    if output == "json":
        print_json(report, indent=1)
    else:
        typer.echo(_report(settings, report))


def _table_versions(settings: Settings, at: str | None, where: str) -> Mapping[str, int | None]:
    """Return the versions of the lake's tables at a time; {}: the current ones.

    A condition needs the versions of all tables.
    """
    if at is None and not where:
        return {}
    snapshots = load("clawstream.stream_jobs.lake.delta.snapshots")
    versions: Mapping[str, int | None] = (
        snapshots.take_snapshot(settings)["versions"]
        if at is None
        else snapshots.resolve_versions(settings, at)
    )
    return versions


def _report(settings: Settings, report: dict[str, Any]) -> str:
    ended = ", ".join(f"{n} {outcome}" for outcome, n in sorted(report["trajectories"].items()))
    before = " (done before)" if report["was_done"] else ""
    answers = f"answers of rules {report['answers']}"
    lines = [
        f"replay {report['name']} of run {settings.run_id}{before}",
        f"steps {report['steps']}, rewards {report['rewards']}, {answers}",
        f"trajectories: {ended or 'none'}; still open {report['open']}",
    ]
    no_rewards = sorted(report["no_rewards"].items(), key=lambda item: -item[1])
    lines += [f"  no reward {count} times: {reason}" for reason, count in no_rewards[:REASONS]]
    for channel, outcome in report["channels"].items():
        lines += _channel(channel, outcome)
    file = settings.data_dir.absolute() / "replays" / report["name"] / "settings.yaml"
    return "\n".join(
        [
            *lines,
            f"{report['steps_per_s']:g} steps/s; assemble {report['assemble_s']:g} s, admit "
            f"{report['admit_s']:g} s",
            f"continue with: --config {file}",
        ]
    )


def _channel(channel: str, outcome: Mapping[str, Any]) -> list[str]:
    refused = ", ".join(f"{n} {reason}" for reason, n in sorted(outcome["refused"].items()))
    return [
        f"{channel}: {len(outcome['batches'])} batches; mean training reward "
        f"{_number(outcome['reward_mean'])}; refused: {refused or 'none'}; late revisions "
        f"{outcome['late']}",
        *(
            [f"  {bare} groups have no training reward: see admit.policy.reward_weights"]
            if (bare := outcome["groups_without_reward"])
            else []
        ),
        *(
            f"  batch {b['batch_seq']:4}  {b['groups']:4} groups {b['trajectories']:5} "
            f"trajectories {b['trainable_tokens']:8} tokens  reward {_number(b['reward_mean'])}  "
            f"{b['content_hash'][:16]}"
            for b in outcome["batches"]
        ),
    ]


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"


@command(app, "check")
def replay_check(
    settings: Settings,
    channel: Channel = "train",
    what_if: Annotated[
        bool,
        typer.Option(
            "--what-if", help="Show the batches under the policy of the settings instead."
        ),
    ] = False,
    output: Format = "text",
) -> None:
    """Check that the recorded candidates and policies give the recorded batches.

    Else exit code 1.
    """
    cluster_of(settings)
    if what_if:
        _print(verify.what_if(settings, channel), channel, output)
        return
    report = verify.check(settings, channel)
    _print(report, channel, output)
    difference = report["first_difference"]
    if output == "text":
        if report["not_checked"]:
            typer.echo(f"{report['not_checked']} batches are of a deleted candidates topic")
        typer.echo(
            f"all {report['batches']} batches came again, in order"
            if difference is None
            else f"first difference: {json.dumps(difference)}"
        )
    if difference is not None:
        raise SystemExit(1)


def _print(report: dict[str, Any], channel: str, output: str) -> None:
    if output == "json":
        print_json(report, indent=1)
        return
    typer.echo(f"run {report['run']}: {report['candidates']} candidates")
    for title in ("recorded", "replayed"):
        typer.echo("\n".join([title, *_channel(channel, report[title])]))


@command(app, "list")
def replay_list(settings: Settings) -> None:
    """List the replays of this data directory."""
    for found in replays.list_replays(settings):
        state = "not done"
        if (result := found["result"]) is not None:
            state = f"{sum(len(c['batches']) for c in result['channels'].values())} batches"
        typer.echo(
            f"{found['name']:26} run {found['asked']['run']:16} from {found['plan']['from']:8} "
            f"{state}"
        )


@command(app, "delete")
def replay_delete(name: Name, settings: Settings) -> None:
    """Delete a replay's topics and its plan; weights and tables made from it stay."""
    cluster_of(settings)
    count = replays.delete_replay(settings, name)
    typer.echo(f"deleted {count} topics of replay {name}")
