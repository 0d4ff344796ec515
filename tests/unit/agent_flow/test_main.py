"""`python -m clawstream.agent_flow`."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from clawstream.agent_flow import main
from clawstream.agent_flow.options import Mode


@pytest.mark.parametrize(
    ("words", "mode", "options"),
    [
        (["n=2", "--", "agent", "--dry", "--eval"], Mode(), ["n=2"]),
        (["--dry", "n=2", "--", "agent", "--dry", "--eval"], Mode(dry=True), ["n=2"]),
    ],
)
def test_flags_of_the_command_are_the_commands(
    monkeypatch: pytest.MonkeyPatch, words: list[str], mode: Mode, options: list[str]
) -> None:
    calls = list[Any]()

    def run_command(*given: Any) -> int:
        calls.append(given)
        return 0

    monkeypatch.setattr(main, "run_command", run_command)
    monkeypatch.setattr(sys, "argv", ["agent_flow", "exec", *words])
    with pytest.raises(SystemExit):
        main.main()
    assert calls == [(["agent", "--dry", "--eval"], options, mode, {})]
