"""Test that a data directory remembers the settings of its `up`.

Settings given to a command take precedence over them.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from clawstream.runtime.process.config import load
from clawstream.runtime.process.remembered_settings import (
    FILE,
    changes,
    forget,
    load_remembered,
    missing_secrets,
    remember,
)
from clawstream.schemas.errors import SettingsError

SECRETS = [
    "gateway.session_secret=hunter2-hunter2-hunter2",
    "gateway.upstreams=[{url: 'http://a:1'}, {url: 'http://b:1', api_key: hunter2}]",
    "kafka={bootstrap_servers: 'a:1', security: {protocol: sasl_ssl, user: u, password: hunter2}}",
    "lake.storage_options={AWS_SECRET_ACCESS_KEY: hunter2, AWS_REGION: eu}",
    "traces.headers={Authorization: hunter2}",
    "rollout.extra_args=['--api-key', hunter2, '--max-num-batched-tokens', '512', "
    "'--hf_token=hunter2']",
]


def kept(directory: Path, *overrides: str) -> None:
    """Remember the settings of an `up` with these overrides in the directory."""
    remember(load(None, [f"data_dir={directory}", *overrides], {}))


def test_the_directory_is_enough(tmp_path: Path) -> None:
    kept(
        tmp_path,
        "run_id=mine",
        "kafka.partitions=3",
        "jobs.reward_functions={a: [exact_match@1]}",
        "broker.port=23000",
    )
    settings = load_remembered(None, [f"data_dir={tmp_path}"], {})
    assert (settings.run_id, settings.kafka.partitions, settings.broker.port) == ("mine", 3, 23000)
    assert settings.data_dir == tmp_path and dict(settings.jobs.reward_functions) == {
        "a": ("exact_match@1",)
    }
    assert load_remembered(None, [], {"CLAWSTREAM__DATA_DIR": str(tmp_path)}) == settings
    assert load_remembered(None, [f"data_dir={tmp_path / 'other'}"], {}).run_id == "default"


def test_what_is_said_wins_and_mappings_are_replaced(tmp_path: Path) -> None:
    kept(
        tmp_path,
        "run_id=mine",
        "jobs.reward_functions={a: [exact_match@1]}",
        "trainer.model_path=/m",
        "trainer.lr=1e-5",
    )
    file = tmp_path / "more.yaml"
    file.write_text("run_id: file\ntrainer: {seed: 7}\n")
    overrides = [
        f"data_dir={tmp_path}",
        "jobs.reward_functions={b: [exact_match@1]}",
        "trainer.model_path=null",
    ]
    settings = load_remembered(file, overrides, {"CLAWSTREAM__ADMIT__POLICY__GROUP_SIZE": "4"})
    assert (settings.run_id, settings.trainer.seed, settings.trainer.lr) == ("file", 7, 1e-5)
    assert (settings.trainer.model_path, settings.admit.policy.group_size) == (None, 4)
    assert set(settings.jobs.reward_functions) == {"b"}


def test_paths_mean_the_same_from_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    remember(load(None, ["data_dir=.", "trainer.model_path=models/a"], {}))
    monkeypatch.chdir(os.sep)
    assert (
        load_remembered(None, [f"data_dir={tmp_path}"], {}).trainer.model_path
        == tmp_path / "models" / "a"
    )


def test_functions_are_looked_for_where_they_were_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, home = tmp_path / "first", tmp_path / "second", tmp_path / "data"
    for folder in (first, second, home):
        folder.mkdir()
    monkeypatch.chdir(first)
    remember(load(None, [f"data_dir={home}", "jobs.reward_functions={'*': ['mine.py:f@1']}"], {}))
    monkeypatch.chdir(second)
    assert load_remembered(None, [f"data_dir={home}"], {}).functions.dirs == (first,)
    named = load_remembered(
        None, [f"data_dir={home}", "jobs.reward_functions={'*': ['other.py:f@1']}"], {}
    )
    assert named.functions.dirs == (second, first)


def test_secrets_are_not_written_and_who_lacks_them_is_told(tmp_path: Path) -> None:
    kept(tmp_path, *SECRETS)
    written = (tmp_path / FILE).read_text()
    assert "hunter2" not in written and stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600
    settings = load_remembered(None, [f"data_dir={tmp_path}"], {})
    assert (settings.kafka.security.protocol, settings.kafka.security.user) == ("sasl_ssl", "u")
    assert [u.url for u in settings.gateway.upstreams] == ["http://a:1", "http://b:1"]
    assert sorted(missing_secrets(settings)) == [
        "gateway.session_secret",
        "gateway.upstreams.1.api_key",
        "kafka.security.password",
        "lake.storage_options.AWS_SECRET_ACCESS_KEY",
        "rollout.extra_args",
        "traces.headers.Authorization",
    ]
    assert missing_secrets(load_remembered(None, [f"data_dir={tmp_path}", *SECRETS], {})) == []


@pytest.mark.parametrize(
    ("word", "missing"),
    [
        ("gateway.upstreams=[{url: 'http://c:1'}]", "gateway.upstreams.1.api_key"),
        (
            "gateway.upstreams=[{url: 'http://a:1'}, {url: 'http://b:1', api_key_env: K}]",
            "gateway.upstreams.1.api_key",
        ),
        (
            "kafka.security={protocol: sasl_ssl, user: u, password_file: /p, password: null}",
            "kafka.security.password",
        ),
    ],
)
def test_a_secret_of_what_was_replaced_is_not_asked_for(
    tmp_path: Path, word: str, missing: str
) -> None:
    kept(tmp_path, *SECRETS)
    before = missing_secrets(load_remembered(None, [f"data_dir={tmp_path}"], {}))
    now = missing_secrets(load_remembered(None, [f"data_dir={tmp_path}", word], {}))
    assert now == [path for path in before if path != missing] != before


@pytest.mark.parametrize(
    ("given", "written"),
    [
        (["--api-key", "hunter2", "hunter3", "--seed", "3"], False),
        (["--seed", "3", "--api-key=hunter2"], False),
        (["--load-config", '{"a": 1, "aws_secret_key": "hunter2"}'], False),
        (["--load-config.s3_token", "hunter2", "--flag"], False),
        (["--tokenizer", "/t", "--max-num-batched-tokens=9", "--ssl-keyfile", "/k"], True),
        (["--quantization", "token"], True),
    ],
)
def test_arguments_of_the_engine_with_a_secret_are_not_written(
    tmp_path: Path, given: list[str], written: bool
) -> None:
    kept(tmp_path, f"rollout.extra_args={json.dumps(given)}")
    assert "hunter" not in (tmp_path / FILE).read_text()
    now = load_remembered(None, [f"data_dir={tmp_path}"], {})
    assert list(now.rollout.extra_args) == (given if written else [])
    assert missing_secrets(now) == ([] if written else ["rollout.extra_args"])
    given_again = load_remembered(
        None, [f"data_dir={tmp_path}", f"rollout.extra_args={json.dumps(given)}"], {}
    )
    assert missing_secrets(given_again) == []
    others = load_remembered(
        None, [f"data_dir={tmp_path}", "rollout.extra_args=['--seed', '4']"], {}
    )
    assert missing_secrets(others) == []


@pytest.mark.parametrize(
    ("was", "now", "said"),
    [
        ("kafka.partitions=3", "kafka.partitions=4", "partitions=4: the data in .* with 3, and"),
        ("broker.hosts=[a]", "broker.hosts=[b]", r"hosts=\('b',\): .* was made with \('a',\), and"),
    ],
)
def test_what_the_data_was_made_with_cannot_change(
    tmp_path: Path, was: str, now: str, said: str
) -> None:
    kept(tmp_path, was, "run_id=mine")
    with pytest.raises(SettingsError, match=rf"{said} that cannot change"):
        load_remembered(None, [f"data_dir={tmp_path}", now], {})
    other = [
        f"data_dir={tmp_path}",
        now,
        "kafka.topic_prefix=other",
        "kafka.bootstrap_servers='a:1'",
    ]
    assert load_remembered(None, other, {}).run_id == "mine"  # other topics


def test_what_leaves_data_behind_is_told(tmp_path: Path) -> None:
    kept(tmp_path, "run_id=one", "lake.uri=s3://a")
    now = load_remembered(None, [f"data_dir={tmp_path}", "run_id=two", "trainer.lr=1e-3"], {})
    assert list(changes(now)) == [("run_id", "one", "two")]


def test_settings_that_were_wrong_are_forgotten(tmp_path: Path) -> None:
    first = load(None, [f"data_dir={tmp_path}", "run_id=one"], {})
    assert remember(first) is None
    before = remember(load(None, [f"data_dir={tmp_path}", "run_id=two"], {}))
    forget(tmp_path, before)
    assert load_remembered(None, [f"data_dir={tmp_path}"], {}).run_id == "one"
    forget(tmp_path, None)
    assert not (tmp_path / FILE).exists()


@pytest.mark.parametrize("content", ["", "[]", json.dumps({"settings": 3})])
def test_a_damaged_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE).write_text(content)
    with pytest.raises(SettingsError, match=r"settings\.json cannot be read: .* Delete it"):
        load_remembered(None, [f"data_dir={tmp_path}"], {})


def test_what_cannot_be_read_for_its_place_or_owner_is_not_to_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match="a part of it is a file"):
        load_remembered(None, [f"data_dir={tmp_path / 'file' / 'data'}"], {})

    def denied(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", denied)
    with pytest.raises(SettingsError, match="as the owner of the data directory"):
        load_remembered(None, [f"data_dir={tmp_path}"], {})
