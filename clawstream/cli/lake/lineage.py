"""`clawstream lineage`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from clawstream.cli.common_options import Form, Run, load, print_json

if TYPE_CHECKING:
    from clawstream.schemas.settings import Settings

Kind = Literal["weights", "step", "trajectory", "run"]


def lineage(
    kind: Annotated[Kind, typer.Argument(metavar="weights|step|trajectory|run")],
    name: Annotated[
        str, typer.Argument(metavar="ID", help="Its id; of weights RUN/SYNC_INDEX.ATTEMPT.")
    ],
    settings: Settings,
    run: Run = None,
    ancestors: Annotated[
        bool,
        typer.Option(
            "--ancestors", help="Of weights: also what the versions before were trained on."
        ),
    ] = False,
    form: Form = "table",
) -> None:
    """What weights were trained on, who sampled a step or trajectory, and what was trained on it.

    Of a run: its versions, batches, groups, trajectories and steps in numbers.
    """
    query, module = load("clawstream.query.connection"), load("clawstream.query.lineage")
    connection = query.connect(settings)
    answer: Any
    lines: Callable[[Any], Iterator[str]]
    try:
        of_lake = module.Lineage(connection)
        match kind:
            case "weights":
                answer, lines = of_lake.weights(name, ancestors), _of_version
            case "step":
                answer, lines = of_lake.step(name, run), _of_steps
            case "trajectory":
                answer, lines = of_lake.trajectory(name, run), _of_trajectories
            case "run":
                answer, lines = of_lake.run(name), _of_run
    finally:
        connection.close()
    if form == "json":
        print_json(answer)
        return
    for line in lines(answer):
        typer.echo(line)


# -- as text


def _of_version(answer: Any) -> Iterator[str]:
    for version in answer["chain"]:
        yield _version(version)
    if answer["descendants"]:
        yield f"later versions that come from it: {', '.join(answer['descendants'])}"
    for batch in answer["batches"]:
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
    total = answer["totals"]
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


def _of_steps(answer: Any) -> Iterator[str]:
    for one in answer:
        step = one["step"]
        yield f"{step['step_id']} of run {step['run_id']}: {one['verdict']}"
        for span in step["sampled_by"]:
            yield (
                f"  tokens {span['first_token']} to {span['end_token'] - 1} sampled by "
                f"{span['version'] or 'unknown'}"
            )
        if one["trajectory"] is not None:
            yield from (f"  {line}" for line in _of_trajectories([one["trajectory"]]))


def _of_trajectories(answer: Any) -> Iterator[str]:
    for one in answer:
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


def _of_run(answer: Any) -> Iterator[str]:
    newest = answer["head"] or "none"
    yield f"run {answer['run_id']}: {answer['steps']} steps; newest version {newest}"
    yield f"versions: {answer['versions']}, {answer['surviving_versions']} on the surviving chain"
    if answer["abandoned"]:
        yield f"  not on it: {', '.join(answer['abandoned'])}"
    for one in answer["trajectories"]:
        yield f"trajectories, {one['channel']}, {one['outcome']}: {one['trajectories']}"
    for one in answer["groups"]:
        what = "admitted" if one["admitted"] else f"refused, {one['reason']}"
        yield (
            f"groups, {one['channel']}, {what}: {one['groups']} with {one['trajectories']} "
            "trajectories"
        )
    for one in answer["batches"]:
        yield (
            f"batches, {one['channel']}: {one['first_batch_seq']} to {one['last_batch_seq']}, "
            f"{one['trained']} of {one['batches']} trained, "
            f"{one['trainable_tokens']} tokens"
        )
    yield f"late revisions: {answer['late_revisions']}"
