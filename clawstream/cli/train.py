"""`clawstream train`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from clawstream.cli.common_options import (
    Config,
    Overrides,
    cluster_of,
    load,
    run,
    settings_of,
)

LAKE_WORDS = ("where", "version", "name")
"""Words `a=b` of --from-lake, which are no settings."""


def train(
    overrides: Overrides = None,
    config: Config = None,
    from_lake: Annotated[
        bool,
        typer.Option(
            "--from-lake",
            help="Train on recorded trajectories: where=SQL, version=TIME or SNAPSHOT, name=NAME.",
        ),
    ] = False,
) -> None:
    """Learn from ready batches and publish weight versions."""
    if not from_lake:
        run("clawstream.trainer.main:main", config, overrides)
        return
    given, rest = lake_words(overrides or ())
    settings = settings_of(config, rest)
    offline, checks = (
        load("clawstream.ops.replay.offline"),
        load("clawstream.trainer.settings_check"),
    )
    # Wrong settings end the command here, not after the replay.
    checks.check_algorithm(settings)
    checks.check_model(settings)
    load("clawstream.runtime.logs").configure("replay", settings.log_level)
    cluster_of(settings)
    is_limited = any(word.startswith("admit.policy.max_staleness=") for word in rest)
    limit = settings.admit.policy.max_staleness if is_limited else None
    prepared = offline.prepare(settings, **given, max_staleness=limit)
    batches, report = prepared.settings.trainer.max_versions, prepared.report
    pins = ", ".join(f"{t} {v}" for t, v in prepared.versions.items() if v is not None)
    typer.echo(f"the lake as of {prepared.as_of}; Delta versions: {pins}")
    typer.echo(
        f"run {report['run']}: {report['steps']} steps of run {settings.run_id}, up to {batches} "
        f"versions; {prepared.left_out} batches are left over"
    )
    outcome = report["channels"]["train"]
    if (mean := outcome["reward_mean"]) is not None:
        typer.echo(f"  mean training reward {mean:g}")
    if bare := outcome["groups_without_reward"]:
        typer.echo(f"  {bare} groups have no training reward: see admit.policy.reward_weights")
    for reason, number in sorted(outcome["refused"].items()):
        typer.echo(f"  refused {number}: {reason}")
    typer.echo(f"weights: {prepared.settings.weights_uri}")
    load("clawstream.trainer.main").main(prepared.settings)


def save_model(
    version: Annotated[str, typer.Argument(help="A version id, RUN/N.N.")],
    out: Annotated[Path, typer.Argument(help="A new directory.")],
    overrides: Overrides = None,
    config: Config = None,
) -> None:
    """Save a published version as a Hugging Face model; an adapter is merged into its base."""
    load("clawstream.trainer.versions.save_model").save_model(
        settings_of(config, overrides), version, out
    )
    typer.echo(out)


def lake_words(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Split words into those of --from-lake and settings.

    A condition may contain equals signs: the first one ends the name.
    """
    given: dict[str, str] = {}
    rest: list[str] = []
    for word in words:
        name, sep, value = word.partition("=")
        if sep and name in LAKE_WORDS:
            given[name] = value
        else:
            rest.append(word)
    return given, rest
