"""The words of `clawstream train --from-lake`."""

from __future__ import annotations

from typer.testing import CliRunner

from clawstream.cli.main import app
from clawstream.cli.train import lake_words


def test_words_of_the_lake_are_no_settings() -> None:
    words = ["where=reward = 1", "trainer.lr=1e-6", "version=12", "run_id=r"]
    assert lake_words(words) == (
        {"where": "reward = 1", "version": "12"},
        ["trainer.lr=1e-6", "run_id=r"],
    )


def test_a_condition_without_the_flag_is_an_unknown_setting() -> None:
    done = CliRunner().invoke(app, ["train", "where=reward = 1"])
    assert done.exit_code == 2


def test_a_missing_model_ends_the_command_before_the_replay() -> None:
    done = CliRunner().invoke(app, ["train", "--from-lake", "kafka.bootstrap_servers=localhost:1"])
    assert done.exit_code == 2 and "trainer.model_path" in str(done.output + done.stderr)
