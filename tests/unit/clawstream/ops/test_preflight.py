"""Test the settings errors that `clawstream up` reports before it starts anything."""

from __future__ import annotations

import socket
from inspect import signature
from pathlib import Path

import pytest
from typer.testing import CliRunner

from clawstream.cli.lake.inspect import inspect
from clawstream.cli.main import app
from clawstream.ops import preflight
from clawstream.ops.preflight import check_distinct, check_ports, ports, problems_of
from clawstream.ops.up import COMMANDS, instances, wanted
from clawstream.runtime.process.config import load
from clawstream.runtime.process.ports import PortTaken, check_free
from clawstream.schemas.algorithms import ALGORITHMS
from clawstream.schemas.errors import SettingsError

EVERY = list(COMMANDS)
DATA_PART = [n for n in EVERY if n not in ("compare", "trainer", "rollout", "traces")]


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("jobs.reward_functions={'*': ['nothing@1']}", "jobs.reward_functions.*"),
        ("jobs.reward_functions={'*': ['no.such.module:function@1']}", "jobs.reward_functions.*"),
        ("jobs.quality_functions={'*': ['nothing@1']}", "jobs.quality_functions.*"),
        ("gateway.compute_reward=nothing@1", "gateway.compute_reward"),
        (
            "gateway.upstreams=[{url: 'http://h:1', api_key_env: NO_SUCH_VARIABLE}]",
            "NO_SUCH_VARIABLE",
        ),
        ("gateway.session_secret=short", "gateway.session_secret"),
        ("gateway.max_in_flight=10000000", "calls need 20000256 open files"),
        ("gateway.tokenizer_path=/no/such/file", "gateway.tokenizer_path"),
        ("gateway.redaction={enabled: true, rules: [nothing]}", "gateway.redaction.rules"),
    ],
)
def test_a_wrong_setting_of_the_data_part_is_named(word: str, said: str) -> None:
    (problem,) = problems_of(load(None, [word], {}), DATA_PART)
    assert said in problem


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["admit.policy.algorithm=magic"],
            "setting admit.policy.algorithm='magic': this trainer has "
            + ", ".join(sorted(ALGORITHMS)),
        ),
        (
            ["trainer.model_path=/no/such/model"],
            "setting trainer.model_path: /no/such/model is no Hugging Face model directory",
        ),
        (
            ["trainer.lr_final=1e-7"],
            "setting trainer.lr_final: a constant learning rate never reaches it; set "
            "trainer.lr_decay=linear or cosine",
        ),
        (
            ["rollout.host=0.0.0.0"],
            "rollout.public_url: rollout.host=0.0.0.0 is no address that can be called",
        ),
    ],
)
def test_a_wrong_setting_of_training_is_named(
    tmp_path: Path, overrides: list[str], said: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    settings = load(
        None, [f"trainer.model_path={tmp_path}", f"rollout.model_path={tmp_path}", *overrides], {}
    )
    assert problems_of(settings, EVERY) == [said]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rollout.tool_parser=nonsense"], "setting rollout.tool_parser='nonsense': vLLM has "),
        (["rollout.reasoning_parser=none"], "setting rollout.reasoning_parser='none': vLLM has "),
        (["rollout.tool_parser_plugin=/no/such.py"], "there is no file /no/such.py"),
        (["trainer.algorithm.advantage=algo.py:nosuch"], "there is no file algo.py in "),
        (["trainer.algorithm.loss=no.such:module"], "setting trainer.algorithm.loss='no.such:"),
    ],
)
def test_a_name_that_only_a_later_import_would_miss_is_named(
    tmp_path: Path, words: list[str], said: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    models = [f"trainer.model_path={tmp_path}", f"rollout.model_path={tmp_path}"]
    (problem,) = problems_of(load(None, [*models, *words], {}), EVERY)
    assert said in problem


def test_parsers_of_vllm_and_of_plugins_are_accepted(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    plugin = tmp_path / "plugin.py"
    plugin.write_text("")
    model = f"rollout.model_path={tmp_path}"
    for words in (
        ["rollout.tool_parser=hermes", "rollout.reasoning_parser=deepseek_r1"],
        ["rollout.tool_parser=mine", f"rollout.tool_parser_plugin={plugin}"],
        ["rollout.reasoning_parser=mine", "rollout.extra_args=['--reasoning-parser-plugin=p.py']"],
        ["rollout.tool_parser=nonsense", "rollout.attach_urls=[http://a:1]"],
    ):
        assert problems_of(load(None, [model, *words], {}), ["rollout"]) == []


def test_all_problems_are_named_at_once_and_only_those_of_processes_that_start() -> None:
    settings = load(
        None,
        ["gateway.compute_reward=nothing@1", "jobs.quality_functions={'*': ['nothing@1']}"],
        {},
    )
    assert len(problems_of(settings, DATA_PART)) == 2
    assert problems_of(settings, ["broker", "lake"]) == []
    assert problems_of(load(None, [], {}), DATA_PART) == []


def test_every_port_is_looked_at() -> None:
    settings = load(None, ["broker.hosts=[a, 127.0.0.1, b]"], {})
    assert [(name, port) for name, _, port, _ in ports(settings, EVERY)] == [
        *(("broker", port) for port in (19102, 19103)),
        ("gateway", 8100),
        ("rollout", 8200),
    ]
    several = load(None, ["rollout.workers=2"], {})
    assert [port for _, _, port, _ in ports(several, ["rollout"])] == [8200, 8201]


def test_two_processes_do_not_share_a_port() -> None:
    words = ["metrics.port=8193", "rollout.workers=2"]
    with pytest.raises(
        SettingsError, match=r"^setting metrics\.port: .*\b8201, and .* rollout \(rollout\.port\)"
    ):
        check_distinct(load(None, words, {}), ["rollout"])
    check_distinct(load(None, [*words, "metrics.port=8210"], {}), EVERY)


def test_the_inspector_has_a_port_of_its_own() -> None:
    settings = load(None, ["broker.hosts=[a, b, 127.0.0.1]", "rollout.workers=8"], {})
    assert signature(inspect).parameters["port"].default not in {
        port for _, _, port, _ in ports(settings, EVERY)
    }


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["rollout.port=65535", "rollout.workers=2"], r"rollout\.port=65535: .* at most 65534"),
        (["metrics.port=65528"], r"metrics\.port=65528: .* at most 65527"),
        (["metrics.port=65527", "rollout.workers=2"], r"metrics\.port=65527: .* at most 65526"),
        (["broker.port=65520", "broker.hosts=[a, b, c]"], r"broker\.port=65520: .* at most 65514"),
    ],
)
def test_ports_above_the_highest_one_are_refused(words: list[str], problem: str) -> None:
    with pytest.raises(SettingsError, match=problem):
        load(None, words, {})


@pytest.mark.parametrize(
    ("words", "started"),
    [
        ([], []),
        (
            [
                "jobs.reward_models={b: {type: genrm, url: 'http://j', model: m, rubric: r, "
                "per: group}}",
                "jobs.reward_functions={'*': [b@1]}",
            ],
            ["compare"],
        ),
        (["trainer.model_path=/m"], ["trainer", "rollout"]),
        (["rollout.model_path=/m"], ["rollout"]),
        (["traces.endpoint=http://collector:4318"], ["traces"]),
        (["trainer.model_path=/m", "rollout.workers=2"], ["trainer", "rollout-0", "rollout-1"]),
        (
            ["rollout.workers=2", "rollout.attach_urls=[http://a:1, http://b:1]"],
            ["rollout-0", "rollout-1"],
        ),
    ],
)
def test_what_the_settings_need_is_started(words: list[str], started: list[str]) -> None:
    settings = load(None, words, {})
    names = [name for name in wanted(settings) if name not in DATA_PART]
    found = {k: v for name in names for k, v in instances(settings, name).items()}
    assert list(found) == started
    ids = [s.rollout.worker_id for name, s in found.items() if name.startswith("rollout-")]
    assert ids == ["worker-0", "worker-1"][: len(ids)]


def test_a_taken_port_names_the_process_and_the_setting() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            PortTaken,
            match=rf"^gateway cannot listen on 127\.0\.0\.1:{port}: Address already in use\. "
            r".* set gateway\.port$",
        ):
            check_free("127.0.0.1", port, "gateway", "gateway.port")
    check_free("127.0.0.1", 0, "gateway", "gateway.port")


def test_all_taken_ports_are_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "PORTS_FREE_S", 0.0)
    with socket.socket() as first, socket.socket() as second:
        for taken in (first, second):
            taken.bind(("127.0.0.1", 0))
            taken.listen()
        ports = [taken.getsockname()[1] for taken in (first, second)]
        words = [f"gateway.port={ports[0]}", f"metrics.port={ports[1]}"]
        with pytest.raises(PortTaken) as error:
            check_ports(load(None, words, {}), ["gateway", "monitor"])
    lines = str(error.value).splitlines()
    assert [str(port) in line for port, line in zip(ports, lines, strict=True)] == [True, True]


def test_admission_alone_refuses_an_unknown_algorithm_before_it_asks_for_kafka(
    tmp_path: Path,
) -> None:
    """Only the trainer knows the algorithms, but admission publishes the policy."""
    words = ["admit", "admit.policy.algorithm=magic", f"data_dir={tmp_path}"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2 and "admit.policy.algorithm='magic'" in done.stderr
