"""The layout is the architecture: who may import whom, one file for each foreign library, and light packages stay light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ALLOWED = {
    "schemas": {"schemas"},
    "runtime": {"schemas", "runtime"},
    "rewards": {"schemas", "rewards"},
    "quality": {"schemas", "quality"},
    "gateway": {"schemas", "runtime", "rewards", "gateway"},
    "stream_jobs": {"schemas", "runtime", "rewards", "quality", "stream_jobs"},
    "trainer": {"schemas", "runtime", "trainer"},
    "rollout": {"schemas", "runtime", "rollout"},
    "demo": {"schemas", "runtime", "demo"},
}
ONLY_IN = {
    "confluent_kafka": {
        f"runtime/kafka/{n}.py" for n in ("cluster", "errors", "outbox", "producer", "reader", "record")
    },
    "faust": {"stream_jobs/worker/faust_app.py"},
    "deltalake": {"stream_jobs/lake/delta/table.py"},
    "duckdb": {"clawstream/query/connection.py"},
    "vllm": {
        "rollout/vllm_plugin/engine.py",
        "demo/tool_parser.py",
    },  # the parser is a plugin that runs inside the engine
    "fastavro": {"schemas/codec/single_object.py"},
}
FILES = sorted(p for package in ALLOWED for p in (ROOT / package).rglob("*.py"))


def imports(path: Path) -> Iterator[str]:
    """Top-level names of all imports of a file, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield (node.module or "").partition(".")[0]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_follow_the_layout(path: Path) -> None:
    name = str(path.relative_to(ROOT))
    package = name.partition("/")[0]
    used = set(imports(path))
    assert not (used & ALLOWED.keys()) - ALLOWED[package], f"{name} imports another process"
    for library, files in ONLY_IN.items():
        assert library not in used or name in files, f"{name} imports {library}; only {sorted(files)} may"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_file_is_a_noun_and_not_too_long(path: Path) -> None:
    assert path.stem not in {"utils", "helpers", "manager", "common", "misc"}
    # Tables: one class for each Avro record, one line for each setting.
    limit = 800 if str(path.relative_to(ROOT)) in ("schemas/records.py", "schemas/settings.py") else 450
    assert len(path.read_text().splitlines()) <= limit, "what noun is missing?"


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("clawstream.cli.main", {"pydantic", "confluent_kafka", "rich", "torch", "faust", "duckdb"}),
        ("schemas.codec.single_object", {"pydantic", "confluent_kafka", "torch"}),
        ("gateway.app", {"torch", "transformers", "faust", "deltalake", "vllm"}),
        ("stream_jobs.admit.main", {"torch", "transformers", "faust", "fastapi", "vllm", "deltalake"}),
        ("stream_jobs.worker.faust_app", {"torch", "transformers", "fastapi", "vllm", "deltalake"}),
        ("clawstream.query.sandbox_launch", {"pydantic", "pyarrow", "duckdb", "deltalake", "confluent_kafka"}),
        ("clawstream.query.sandbox", {"duckdb", "deltalake", "faust", "torch", "confluent_kafka"}),
        ("clawstream.query.sandbox_process", {"confluent_kafka", "structlog", "faust", "torch"}),
        ("rollout.main", {"torch", "vllm", "transformers", "faust", "fastapi"}),
    ],
)
def test_light_modules_stay_light(module: str, heavy: set[str]) -> None:
    code = f"import sys, {module}; print(' '.join({{m.partition('.')[0] for m in sys.modules}}))"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert not set(done.stdout.split()) & heavy


def test_no_init_files_under_tests() -> None:
    assert not list((ROOT / "tests").rglob("__init__.py"))
