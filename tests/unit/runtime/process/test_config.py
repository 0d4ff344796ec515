"""Test the settings: three sources, strict parsing, and errors that name the path."""

from __future__ import annotations

from pathlib import Path

import pytest

from clawstream.runtime.process.config import load, with_values
from clawstream.schemas.errors import SettingsError


def test_words_beat_environment_beats_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("run_id: file\ntrainer: {lr: 1e-5, seed: 1}\nkafka: {partitions: 3}\n")
    settings = load(
        file,
        ["trainer.lr=3e-4"],
        {"CLAWSTREAM__TRAINER__LR": "2e-4", "CLAWSTREAM__TRAINER__SEED": "2", "PATH": "x"},
    )
    assert (
        settings.run_id,
        settings.trainer.lr,
        settings.trainer.seed,
        settings.kafka.partitions,
    ) == (
        "file",
        3e-4,
        2,
        3,
    )


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("trainer.lrr=1", "setting trainer.lrr: there is no such setting"),
        ("trainer.lr=fast", "setting trainer.lr: Input should be a valid number"),
        ("kafka=3", "setting kafka: Input should be a valid dictionary"),
        ("run_id=Not/Good", "setting run_id: String should match pattern"),
        ("trainer.lr", "settings are written a.b=c"),
        ("trainer.lr={", "setting trainer.lr: '{' is not valid YAML"),
        ("trainer.lr=[&a [1, 1], &b [*a, *a], [*b, *b]]", "aliases are not allowed"),
        ("trainer.lr=2026-13-45", "is not valid YAML: month must be in 1..12"),
        ("run_id=1.5", "setting run_id: String should match pattern"),
        ("trainer.lr=" + "9" * 5000, "is not valid YAML: Exceeds the limit"),
        ("trainer.lr=" + "[" * 5000, "is not valid YAML"),
        ("admit.policy.group_size=1", "min_members 2 is above group_size 1"),
        ("jobs.trajectory_timeout_s=2e6", "above half of kafka.steps_retention_s"),
        (
            "jobs.trajectory_timeout_s=1e5",
            "jobs.closed_horizon_s=86400 must exceed jobs.trajectory_timeout_s=100000",
        ),
        ("jobs.closed_horizon_s=1000", "must exceed jobs.trajectory_timeout_s"),
        ("admit.policy.reward_deadline_s=1e5", "must exceed admit.policy.reward_deadline_s"),
        ("broker.hosts=[a, b]", "hosts names 1, 3 or 5 different hosts"),
    ],
)
def test_wrong_setting_is_named(word: str, message: str) -> None:
    with pytest.raises(SettingsError) as error:
        load(None, [word], {})
    assert message in str(error.value)


IDS = ["7", "010", "0x10", "1e3", "2026-01-01", "2026-13-45", "true", "null", "no", "007-a"]


@pytest.mark.parametrize("text", IDS)
def test_an_id_is_what_is_written(tmp_path: Path, text: str) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(
        f"run_id: {text}\ndata_dir: {text}\njobs: {{worker_id: '{text}', "
        f"reward_functions: {{{text}: [exact_match]}}}}\nrollout: {{gpus: [{text}]}}\n"
        f"kafka: {{client_options: {{client.id: {text}}}}}\n"
    )
    in_file = load(file, [], {})
    given = load(None, [f"run_id={text}", f"data_dir={text}", f"jobs.worker_id='{text}'"], {})
    from_environment = load(None, [], {"CLAWSTREAM__RUN_ID": f"{text}\n"})
    for settings in (in_file, given):
        assert (settings.run_id, settings.data_dir, settings.jobs.worker_id) == (
            text, Path(text), text
        )  # fmt: skip
    assert from_environment.run_id == text
    assert (dict(in_file.jobs.reward_functions), in_file.rollout.gpus) == (
        {text: ("exact_match",)}, (text,)
    )  # fmt: skip
    assert in_file.kafka.client_options == {"client.id": text}


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("gateway.host=::1", "::1"),
        ("gateway.host=[::1]", "[::1]"),
        ("gateway.host='a: b'", "a: b"),
        ("gateway.host=a: #b", "a: #b"),
        ('gateway.host="\\u0041"', "A"),
        ("gateway.host='", "'"),
        ("gateway.host=*@%", "*@%"),
    ],
)
def test_text_needs_no_quotes(word: str, value: str) -> None:
    assert load(None, [word], {}).gateway.host == value


@pytest.mark.parametrize("text", ["", "null", "~"])
def test_null_unsets_text_that_may_be_absent(tmp_path: Path, text: str) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(f"lake: {{uri: {text}}}\n")
    assert load(None, [f"lake.uri={text}"], {}).lake.uri is None
    assert load(file, [], {}).lake.uri is None


@pytest.mark.parametrize(
    "overrides",
    [
        ["gateway.sesion_secret=hunter2"],
        ["kafka.client_options={sasl.password: [hunter2]}"],
        ["kafka.client_options={sasl.password: hunter2}"],
        ["kafka.bootstrap_servers='a:1'", "kafka.security={password: hunter2}"],
        ["kafka.security.user=me", "kafka.security.password=hunter2", "admit.policy.min_members=9"],
        ["lake.storage_options=hunter2"],
        ["gateway.blob_options=hunter2"],
        ["gateway.blob_options={key: [hunter2]}"],
        ["gateway.upstreams=[{url: 'http://a:1', api_key: [hunter2]}]"],
        ["gateway.upstreams=[{url: 'http://a:1', api_kee: hunter2}]"],
        ["rollout.extra_args=--api-key=hunter2"],
        ["rollout.extra_args=[--api-key, {hunter2: 1}]"],
        ["rollout.extra_args=['--api-key', 'hunter2"],
        ["rollout.extra_argz=[--api-key, hunter2]"],
        ["rollot={api_key: hunter2}"],
        ["traces.headers=Authorization=Basic hunter2"],
        ["traces.headers={Authorization: 'Basic hunter2}"],
        ["traces.headers={Authorization: [hunter2]}"],
        ["traces.endpoint=http://me:hunter2@collector:4318"],
        ["gateway.session_secret=hunter2", "admit.policy.min_members=9"],
    ],
)
def test_secrets_are_not_repeated(overrides: list[str]) -> None:
    with pytest.raises(SettingsError) as error:
        load(None, overrides, {})
    assert "hunter2" not in str(error.value) and "setting " in str(error.value)
    assert "hunter2" not in str(error.value.__cause__)


def test_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"nowhere\.yaml"):
        load(tmp_path / "nowhere.yaml", [], {})
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(SettingsError, match="must be a mapping"):
        load(tmp_path / "list.yaml", [], {})
    for content in (b"\xff\xfe\x80", b"trainer: {lr: 2026-13-45}", b"trainer: {lr: " + b"[" * 5000):
        (tmp_path / "broken.yaml").write_bytes(content)
        with pytest.raises(SettingsError, match=r"settings file .*broken\.yaml: "):
            load(tmp_path / "broken.yaml", [], {})


def test_an_algorithm_that_compares_members_refuses_groups_of_one() -> None:
    with pytest.raises(SettingsError, match="cispo needs groups of at least 2"):
        load(None, ["admit.policy.group_size=1", "admit.policy.min_members=1"], {})


def test_settings_are_frozen() -> None:
    settings = load(None, [], {})
    with pytest.raises(ValueError, match="frozen"):
        settings.run_id = "x"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("overrides", "replication"),
    [
        ([], (1, 1)),
        (["broker.hosts=[a]"], (1, 1)),
        (["broker.hosts=[a, b, c]"], (3, 2)),
        (["broker.hosts=[a, b, c, d, e]"], (3, 2)),
        (["broker.hosts=[a, b, c]", "kafka.replication_factor=1"], (1, 1)),
        (["kafka.bootstrap_servers='a:1'"], (1, 1)),
        (["kafka.bootstrap_servers='a:1'", "kafka.replication_factor=3"], (3, 2)),
        (
            [
                "kafka.bootstrap_servers='a:1'",
                "kafka.replication_factor=3",
                "kafka.min_insync_replicas=1",
            ],
            (3, 1),
        ),
    ],
)
def test_topics_are_replicated_as_the_cluster_allows(
    overrides: list[str], replication: tuple[int, int]
) -> None:
    assert load(None, overrides, {}).replication == replication


def test_changed_settings_are_the_others_with_these_judged_as_a_whole() -> None:
    before = load(
        None,
        [
            "trainer.lr=3e-4",
            "gateway.upstreams=['http://127.0.0.1:1']",
            "admit.policy.group_size=4",
        ],
        {},
    )
    after = with_values(before, {"admit.policy.sync_every": 2})
    assert after.model_dump(exclude={"admit", "trainer"}) == before.model_dump(
        exclude={"admit", "trainer"}
    )
    assert (after.admit.policy.sync_every, after.admit.policy.group_size, after.trainer.lr) == (
        2,
        4,
        3e-4,
    )
    assert with_values(before, {}) == before
    with pytest.raises(SettingsError, match="min_members 5 is above group_size 4"):
        with_values(before, {"admit.policy.min_members": 5})
    with pytest.raises(
        SettingsError, match=r"setting trainer.lr: Input should be greater than 0, got -1"
    ):
        with_values(before, {"trainer.lr": -1})
