"""Test the settings that the command line of Claw-R1's gateway gives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from clawstream.gateway.claw_r1.flags import translate
from clawstream.runtime.process.config import load
from clawstream.schemas.settings import GatewaySettings

ROOT = Path(__file__).parents[4]
DOCUMENTED = [
    "--data-pool-name", "data_pool", "--vllm-addresses", "host1:8001, https://host2:8001,",
    "--tokenizer-path", "/models/a b#c: d", "--prompt-length", "4096", "--response-length=1024",
]  # fmt: skip
RAY = [
    "--reward-worker-name",
    "reward_loop_worker",
    "--ray-address",
    "auto",
    "--ray-namespace",
    "claw",
]


def settings_of(arguments: list[str]) -> GatewaySettings:
    return load(None, translate(arguments).words, {}).gateway


def test_each_flag_is_a_setting() -> None:
    found = settings_of([*DOCUMENTED, "--host", "0.0.0.0", "--port", "8123"])
    assert found == GatewaySettings(
        upstreams=("http://host1:8001", "https://host2:8001"),
        tokenizer_path=Path("/models/a b#c: d"), max_prompt_tokens=4096,
        default_max_tokens=1024, host="0.0.0.0", port=8123,
    )  # fmt: skip


def test_what_has_no_meaning_is_said_in_a_line_each() -> None:
    notices = translate([*DOCUMENTED, *RAY]).notices
    assert [n.split()[0] for n in notices] == ["--data-pool-name", *RAY[::2]]
    assert all("has no meaning any more: " in n and "\n" not in n for n in notices)
    assert translate([]) == ([], [])


def test_words_win_over_flags_wherever_they_stand() -> None:
    translation = translate(["run_id=r", "--port", "8123", "gateway.port=9", *DOCUMENTED])
    assert load(None, translation.words, {}).gateway.port == 9
    assert load(None, translation.words, {}).run_id == "r"


@pytest.mark.parametrize("arguments", [["--nope", "1"], ["--prompt-length", "long"], ["--port"]])
def test_wrong_flags_end_with_the_usage(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        translate(arguments)
    assert ended.value.code == 2
    assert arguments[0] in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_takes_them() -> None:
    flags = ["--prompt-length", "0", "--ray-address", "auto"]
    done = subprocess.run(
        [sys.executable, "-m", "clawstream", "gateway", *flags],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 2
    notice, error = done.stderr.splitlines()
    assert notice == "clawstream: --ray-address has no meaning any more: there is no Ray"
    assert error.startswith("clawstream: setting gateway.max_prompt_tokens: ")
