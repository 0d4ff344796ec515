"""`clawstream flow`: rollouts of agent flows and of command lines."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from clawstream.cli.common_options import (
    Config,
    fail,
    group,
    load,
    names_and_overrides,
    settings_of,
)

Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="[name=value]...", help="Options of the flow, and settings a.b=c."),
]
Evaluate = Annotated[
    bool, typer.Option("--eval", help="On channel val, which is never trained, one rollout a task.")
]
Dry = Annotated[
    bool, typer.Option("--dry", help="One rollout without effect; prints its conversation.")
]

app = group()


class CommandAfterDashes(TyperCommand):
    """Keep what follows the first `--` apart: a command line, whose words are no options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        ctx.obj = args[at + 1 :]
        return super().parse_args(ctx, args[:at])


@app.command("run")
def run(
    flow: Annotated[
        str, typer.Argument(metavar="FILE.py:FLOW|env=LIBRARY:NAME", help="A flow or environment.")
    ],
    words: Words = None,
    evaluate: Evaluate = False,
    dry: Dry = False,
    config: Config = None,
) -> None:
    """Play a flow's tasks against the gateway; names the rollouts that failed, and why."""
    names, given = names_and_overrides([flow, *(words or ())])
    spec = names.pop(0) if names else None
    _play("run_flow", spec, [*names, *given], evaluate, dry, config)


@app.command("exec", cls=CommandAfterDashes)
def execute(
    ctx: typer.Context,
    words: Annotated[
        list[str], typer.Argument(metavar="tasks=FILE [name=value]... -- COMMAND [ARGUMENT]...")
    ],
    evaluate: Evaluate = False,
    dry: Dry = False,
    config: Config = None,
) -> None:
    """Run a command line for each task, with the gateway in its environment.

    Any agent that reads OPENAI_BASE_URL or ANTHROPIC_BASE_URL works. `{field}` in an argument is
    the task's. reward=exit|file|none|FILE.py:FUNCTION says where the reward comes from.
    """
    _play("run_command", ctx.obj, words, evaluate, dry, config)


def _play(
    function: str,
    what: Any,
    words: Sequence[str],
    evaluate: bool,
    dry: bool,
    config: Any,
) -> None:
    main, errors, options = (
        load(f"clawstream.agent_flow.{m}") for m in ("main", "errors", "options")
    )
    own = [word for word in words if not _is_setting(word, options.Words.model_fields)]
    settings = settings_of(config, [word for word in words if word not in own])
    mode = options.Mode(evaluate=evaluate, dry=dry)
    play: Callable[..., int] = getattr(main, function)
    defaults = {
        "gateway": settings.gateway.public_url or f"http://127.0.0.1:{settings.gateway.port}",
        "run": settings.run_id,
        "state": settings.data_dir / "flows",
    }
    try:
        raise SystemExit(play(what, own, mode, defaults))
    except errors.FlowError as error:
        fail(str(error), 2)


def _is_setting(word: str, options: Container[str]) -> bool:
    """Return whether a word is a setting; all others are options, or unknown."""
    from clawstream.schemas.settings import Settings

    name = word.partition("=")[0]
    return "." in name or (name in Settings.model_fields and name not in options)
