"""`clawstream flow`: options of the flow, settings, and the command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from clawstream.agent_flow import main
from clawstream.agent_flow.errors import FlowError
from clawstream.agent_flow.flow import Limits
from clawstream.agent_flow.options import Mode, options_of, parse_words
from clawstream.cli.flow import app


def test_command_is_all_that_follows_the_dashes(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[Any]()

    def run_command(*given: Any) -> int:
        calls.append(given[:3])
        return 0

    monkeypatch.setattr(main, "run_command", run_command)
    words = ["exec", "tasks=t.jsonl", "n=8", "--dry", "--", "A=1", "agent", "--eval", "--", "n=2"]
    assert CliRunner().invoke(app, words).exit_code == 0
    command = ["A=1", "agent", "--eval", "--", "n=2"]
    assert calls == [(command, ["tasks=t.jsonl", "n=8"], Mode(dry=True))]


def test_words_override_the_flow_and_evaluation_plays_each_task_once() -> None:
    words = parse_words(["concurrency=2", "temperature=0", "shard=1/3"], {"run": "mine"})
    options = options_of(words, Limits(), Mode())
    assert (options.run, options.channel, options.shard) == ("mine", "train", (1, 3))
    assert (options.limits.group_size, options.limits.concurrency) == (8, 2)
    assert options.sampling == {"temperature": 0}
    evaluation = options_of(words, Limits(), Mode(evaluate=True))
    assert (evaluation.channel, evaluation.limits.group_size) == ("val", 1)
    dry = options_of(words, Limits(), Mode(dry=True))
    assert (dry.channel, dry.limit) == ("val", 1)


def test_words_with_a_dot_or_the_name_of_a_setting_are_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls = list[Any]()

    def run_flow(*given: Any) -> int:
        calls.append(given)
        return 0

    monkeypatch.setattr(main, "run_flow", run_flow)
    words = [f"data_dir={tmp_path}", "run_id=mine", "kafka={partitions: 2}", "gateway.port=9"]
    assert CliRunner().invoke(app, ["run", *words, "n=2", "flow.py:f"]).exit_code == 0
    defaults = {"gateway": "http://127.0.0.1:9", "run": "mine", "state": tmp_path / "flows"}
    assert calls == [("flow.py:f", ["n=2"], Mode(), defaults)]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("gateway={port: 9}", "must be a URL such as http://127.0.0.1:8100; a setting of the"),
        ("gateway=127.0.0.1:8100", "must be a URL such as http://127.0.0.1:8100"),
        ("limt=3", "limt: no such option; there are gateway, run"),
        ("limit", "'limit': must be name=value"),
        ("kafka.x=", "setting kafka.x: there is no such setting"),
        ("kafka=", "setting kafka: Input should be a valid dictionary"),
    ],
)
@pytest.mark.parametrize("words", ["run flow.py:f {}", "exec tasks=t.jsonl {} -- agent"])
def test_a_wrong_word_has_one_line_that_says_what_is_wrong(
    words: str, word: str, message: str
) -> None:
    given = [word if part == "{}" else part for part in words.split()]
    result = CliRunner().invoke(app, given)
    assert (result.exit_code, message in result.stderr) == (2, True), result.output


@pytest.mark.parametrize("word", ["n", "n=0", "n=many", "shard=3", "color=red", "top_p=2"])
def test_wrong_word_is_named(word: str) -> None:
    with pytest.raises(FlowError, match=word.partition("=")[0]):
        parse_words([word], {})


def test_shard_beyond_the_processes_is_refused() -> None:
    with pytest.raises(FlowError, match="shard=3/3"):
        options_of(parse_words(["shard=3/3"], {}), Limits(), Mode())
