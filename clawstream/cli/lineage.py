"""`clawstream lineage`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clawstream.cli.common_options import Config, Form, Overrides, group, load, settings_of

if TYPE_CHECKING:
    from schemas.settings import Settings

app = group("What a weight version was made of, and what became of a step. Asks the lake.")
Run = Annotated[str | None, typer.Option("--run", help="Of this run only.")]


def _ask(settings: Settings, question: Callable[[Any], Any]) -> Any:
    """An answer of the lake."""
    ancestry, sql = load("clawstream.query.lineage"), load("clawstream.query.connection")
    connection = sql.connect(settings)
    try:
        return question(ancestry.Lineage(connection))
    finally:
        connection.close()


def _tell(answer: Any, form: str, lines: Callable[[Any], Iterator[str]]) -> None:
    if form == "json":
        typer.echo(json.dumps(answer, default=str, ensure_ascii=False))
        return
    for line in lines(answer):
        typer.echo(line)


@app.command("weights")
def lineage_weights(
    version: Annotated[str, typer.Argument(help="<run>/<sync index>.<attempt>")],
    overrides: Overrides = None,
    config: Config = None,
    ancestors: Annotated[
        bool, typer.Option("--ancestors", help="Also what the versions before it were trained on.")
    ] = False,
    form: Form = "table",
) -> None:
    """Show the batches, groups, trajectories and steps of a version, and who sampled them."""
    _tell(
        _ask(settings_of(config, overrides), lambda a: a.weights(version, ancestors)),
        form,
        _of_version,
    )


@app.command("step")
def lineage_step(
    step_id: Annotated[str, typer.Argument(metavar="ID")],
    overrides: Overrides = None,
    config: Config = None,
    run: Run = None,
    form: Form = "table",
) -> None:
    """Which versions sampled a step, which were trained on it, or why none was."""
    _tell(_ask(settings_of(config, overrides), lambda a: a.step(step_id, run)), form, _of_steps)


@app.command("trajectory")
def lineage_trajectory(
    trajectory_id: Annotated[str, typer.Argument(metavar="ID")],
    overrides: Overrides = None,
    config: Config = None,
    run: Run = None,
    form: Form = "table",
) -> None:
    """Which batch a trajectory is in and which versions were trained on it, or why none was."""
    _tell(
        _ask(settings_of(config, overrides), lambda a: a.trajectory(trajectory_id, run)),
        form,
        _of_trajectories,
    )


@app.command("run")
def lineage_run(
    run: Annotated[str, typer.Argument(metavar="RUN")],
    overrides: Overrides = None,
    config: Config = None,
    form: Form = "table",
) -> None:
    """A run in numbers: versions, batches, groups, trajectories, steps."""
    _tell(_ask(settings_of(config, overrides), lambda a: a.run(run)), form, _of_run)


# -- as text


def _of_version(said: Any) -> Iterator[str]:
    for version in said["chain"]:
        yield _version(version)
    if said["descendants"]:
        yield f"later versions that come from it: {', '.join(said['descendants'])}"
    for batch in said["batches"]:
        yield (
            f"batch {batch['batch_seq']} of {batch['version_id']}, policy "
            f"{batch['admission_policy_version']}"
        )
        for one in batch["groups"]:
            yield f"  group {one['group_id']}, round {one['round']}"
            for member in one["members"]:
                reward = "no reward" if member["reward"] is None else f"reward {member['reward']:g}"
                yield (
                    f"    trajectory {member['trajectory_id']}, revision "
                    f"{member['revision']}, {reward}"
                )
                for step in member["steps"]:
                    yield f"      {_step(step)}"
                if not member["steps"]:
                    yield "      its steps are not in the lake"
    total = said["totals"]
    yield (
        f"{total['batches']} batches, {total['groups']} groups, {total['trajectories']} "
        f"trajectories, {total['trained_steps']} of "
        f"{total['steps']} steps trained with {total['trained_tokens']} tokens, sampled by "
        f"{', '.join(total['sampled_by']) or 'none'}"
    )


def _version(version: Any) -> str:
    batches = "no batches"
    if version["first_batch_seq"] is not None:
        batches = f"batches {version['first_batch_seq']} to {version['last_batch_seq']}"
    off = "" if version["surviving"] else ", not on the surviving chain"
    return f"{version['version_id']}: from {version['parent_version'] or 'nothing'}, {batches}{off}"


def _step(step: Any) -> str:
    what = (
        f"{step['response_tokens']} tokens trained"
        if step["trained"]
        else f"not trained: {step['untrained_reason']}"
    )
    if not step["trained"] and step["untrained_reason"] is None:
        what = f"{step['response_tokens']} tokens, in a batch that no version was trained on yet"
    tags = f", {'+'.join(step['tags'])}" if step["tags"] else ""
    return (
        f"{step['step_id']}: {what}, sampled by {', '.join(step['sampled_by']) or 'unknown'}{tags}"
    )


def _of_steps(said: Any) -> Iterator[str]:
    for one in said:
        step = one["step"]
        yield f"{step['step_id']} of run {step['run_id']}: {one['verdict']}"
        for span in step["sampled_by"]:
            yield (
                f"  tokens {span['first_token']} to {span['end_token'] - 1} sampled by "
                f"{span['version'] or 'unknown'}"
            )
        if one["trajectory"] is not None:
            yield from (f"  {line}" for line in _of_trajectories([one["trajectory"]]))


def _of_trajectories(said: Any) -> Iterator[str]:
    for one in said:
        where = f"group {one['group_id']}, channel {one['channel']}, {one['outcome']}"
        yield f"trajectory {one['trajectory_id']} of run {one['run_id']}, {where}: {one['verdict']}"
        for version in one["trained_by"]:
            off = "" if version["surviving"] else " (not on the surviving chain)"
            after = f", then {', '.join(version['descendants'])}" if version["descendants"] else ""
            yield f"  trained {version['version_id']}{off}{after}"
        for late in one["late_revisions"]:
            yield (
                f"  revision {late['revision']} came too late for batch {late['missed_batch_seq']}"
            )
        for step in one["steps"]:
            yield f"  {_step(step)}"


def _of_run(said: Any) -> Iterator[str]:
    yield f"run {said['run_id']}: {said['steps']} steps; newest version {said['head'] or 'none'}"
    yield f"versions: {said['versions']}, {said['surviving_versions']} on the surviving chain"
    if said["abandoned"]:
        yield f"  not on it: {', '.join(said['abandoned'])}"
    for one in said["trajectories"]:
        yield f"trajectories, {one['channel']}, {one['outcome']}: {one['trajectories']}"
    for one in said["groups"]:
        what = "admitted" if one["admitted"] else f"refused, {one['reason']}"
        yield (
            f"groups, {one['channel']}, {what}: {one['groups']} with {one['trajectories']} "
            "trajectories"
        )
    for one in said["batches"]:
        yield (
            f"batches, {one['channel']}: {one['first_batch_seq']} to {one['last_batch_seq']}, "
            f"{one['trained']} of {one['batches']} trained, "
            f"{one['trainable_tokens']} tokens"
        )
    yield f"late revisions: {said['late_revisions']}"
