"""Check that the words of a container are a command of `clawstream`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from clawstream.cli.main import app


def parse(words: Sequence[str]) -> dict[str, Any]:
    """Parse the words behind `clawstream`, without running the command.

    Returns:
        The values of its parameters.

    Raises:
        AssertionError: There is no such command.
        Exception: It has no such option, as typer says.
    """
    command: Any = get_command(app)
    rest = list(words)
    while isinstance(command, TyperGroup):
        name = rest.pop(0)
        found = command.get_command(typer.Context(command, info_name=command.name), name)
        assert found is not None, f"clawstream has no command {name}"
        command = found
    params: dict[str, Any] = command.make_context(command.name, rest).params
    return params
