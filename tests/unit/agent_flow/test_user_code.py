"""Errors of a user's own file: a short message with the user's lines, and exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.gateway import GatewayFixture, run_gateway
from support.scripted.script import Script, ScriptedChoice
from typer.testing import CliRunner

from clawstream.agent_flow.errors import FlowError
from clawstream.agent_flow.flow import Limits, load_flow
from clawstream.agent_flow.gateway.client import Gateway
from clawstream.agent_flow.main import run_flow
from clawstream.agent_flow.options import Mode
from clawstream.agent_flow.play.progress import Progress
from clawstream.agent_flow.play.runner import Options, Runner
from clawstream.cli.flow import app
from clawstream.schemas.codec.single_object import Codec

FLOW = """
from clawstream.agent_flow import flow

@flow(group_size=1)
async def greet(task, rollout):
    return 1.0
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import numpyy\n", ["ModuleNotFoundError", "line 1", "import numpyy", "install the"]),
        ("x = 1\ndef f(:\n", ["SyntaxError", "line 2", "def f(:"]),
        ("import json\njson.loads('{')\n", ["JSONDecodeError", "line 2", "json.loads('{')"]),
        ("raise SystemExit(3)\n", ["SystemExit: 3", "line 1", "__main__"]),
    ],
)
def test_file_that_cannot_be_imported(tmp_path: Path, text: str, expected: list[str]) -> None:
    file = tmp_path / "broken.py"
    file.write_text(text)
    result = CliRunner().invoke(app, ["run", f"{file}:greet", f"data_dir={tmp_path}"])
    assert result.exit_code == 2, result.output
    assert all(part in result.stderr for part in [str(file), *expected]), result.stderr
    assert len(result.stderr.splitlines()) <= 4 and "Traceback" not in result.stderr


def test_module_that_imports_an_absent_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "absent_import.py").write_text("import numpyy\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(FlowError, match=r"(?s)module absent_import failed.*line 1.*numpyy"):
        run_flow("absent_import:greet", [], Mode(), {})
    with pytest.raises(FlowError, match="module 'no_such_module': No module named"):
        run_flow("no_such_module:greet", [], Mode(), {})


@pytest.mark.parametrize(
    ("what", "text"),
    [
        (
            "tasks",
            "@greet.tasks\ndef tasks():\n    yield {'id': 1}\n    raise OSError('disk away')\n",
        ),
        (
            "lifespan",
            "@greet.tasks\ndef tasks():\n    return []\n\n"
            "@greet.lifespan\nasync def life():\n    raise OSError('disk away')\n",
        ),
    ],
)
def test_what_tasks_and_lifespan_raise(tmp_path: Path, what: str, text: str) -> None:
    if what == "lifespan":
        text = "from contextlib import asynccontextmanager\n" + text.replace(
            "async def", "@asynccontextmanager\nasync def"
        )
    file = tmp_path / f"raises_in_{what}.py"
    file.write_text(FLOW + text + "    yield\n")

    played = load_flow(f"{file}:greet")

    async def scenario(fixture: GatewayFixture) -> None:
        async with Gateway(fixture.url, None) as gateway:
            options = Options(Limits(group_size=1), "default", "val")
            await Runner(played, gateway, options, Progress()).play(played.source)

    script = Script([ScriptedChoice([7], ["hi"], [-0.5])])
    with pytest.raises((FlowError, ExceptionGroup)) as caught:
        run_gateway(tmp_path, Codec(), scenario, script)
    error: BaseException = caught.value
    if isinstance(error, ExceptionGroup):
        (error,) = error.exceptions
    assert isinstance(error, FlowError)
    message = str(error)
    assert f"the {what} of flow greet failed: OSError: disk away" in message
    assert f"{file}, line" in message and "raise OSError" in message
    assert "agent_flow/" not in message
