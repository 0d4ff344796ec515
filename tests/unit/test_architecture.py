"""Test the layout: imports between packages, one place for each foreign library, light modules."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ALLOWED = {
    "schemas": {"schemas"},
    "runtime": {"schemas", "runtime"},
    "rewards": {"schemas", "rewards"},
    "gateway": {"schemas", "runtime", "rewards", "gateway"},
    "stream_jobs": {"schemas", "runtime", "rewards", "stream_jobs"},
    "trainer": {"schemas", "runtime", "trainer"},
    "rollout": {"schemas", "runtime", "rollout"},
    "inspector": {"schemas", "runtime", "inspector"},
    "agent_flow": {"schemas", "agent_flow"},  # `schemas.numbers` only: the SDK installs alone
    "clawstream": {
        "agent_flow",
        "schemas",
        "runtime",
        "rewards",
        "gateway",
        "stream_jobs",
        "trainer",
        "rollout",
        "inspector",
        "clawstream",
    },
    "demo": {"schemas", "runtime", "clawstream", "demo"},
}
"""Which folders a folder may import. `clawstream` is the folder itself, without its links."""
JOBS = {f"stream_jobs.{name}" for name in ("assemble", "reward", "compare", "admit", "lake")}
ONLY_IN = {
    "confluent_kafka": {
        f"runtime/kafka/{n}.py"
        for n in (
            "cluster",
            "errors",
            "leaders",
            "loop_producer",
            "producer",
            "reader",
            "record",
            "retries",
            "security",
        )
    },
    "faust": {"stream_jobs/worker/shell.py", "stream_jobs/worker/faust_consumer.py"},
    "deltalake": {"stream_jobs/lake/delta/table.py"},
    "duckdb": {"clawstream/query/connection.py"},
    "vllm": {
        "rollout/vllm_plugin/engine.py",
        "demo/tool_parser.py",
    },  # the parser runs inside the engine
    "fastavro": {"schemas/codec/foreign.py"},
    "opentelemetry": {"clawstream/ops/tracing/otlp.py"},
    "renderers": {"rollout/vllm_plugin/continuation.py"},
}
FILES = sorted(p for package in ALLOWED for p in (ROOT / package).rglob("*.py"))
MODULE_NAME = re.compile(r"[a-z_][a-z0-9_]*(\.[a-z_][a-z0-9_]*)+(:[A-Za-z_][A-Za-z0-9_]*)?")


def name_of(path: Path) -> str:
    """Return the module of a file, without `clawstream.` where the file is in a process."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path) for path in FILES}


def local(module: str) -> str:
    """Return the name of an imported module as `name_of` has it."""
    first, _, rest = module.partition(".")
    return rest if first == "clawstream" and rest.partition(".")[0] in ALLOWED else module


def package_of(module: str) -> str:
    """Return the package on the second level; a module directly in a process is its own package."""
    return ".".join(module.split(".")[:2])


@cache
def imports(path: Path) -> frozenset[str]:
    """Return all modules that a file imports or names in a string, including inside functions.

    Only Clawstream modules count as named in a string.
    """
    return frozenset(_imports(path))


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (checked(alias.name, path) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path}: relative import"
            module = checked(node.module, path)
            for alias in node.names:
                whole = local(f"{node.module}.{alias.name}")
                yield whole if whole in MODULES else module
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and MODULE_NAME.fullmatch(node.value)
        ):
            module = local(node.value.partition(":")[0])
            if module in MODULES:
                yield module


def checked(module: str, path: Path) -> str:
    first = module.partition(".")[0]
    assert first not in ALLOWED or first == "clawstream", f"{path}: import clawstream.{module}"
    return local(module)


def arrows() -> dict[str, set[str]]:
    """Return the packages that each package imports, on the second level."""
    found = defaultdict(set)
    for path in FILES:
        here = package_of(name_of(path))
        there = {package_of(module) for module in imports(path) if module in MODULES}
        found[here] |= there - {here}
    return found


def test_each_folder_is_in_the_package_by_a_link() -> None:
    links = {p.name: p.resolve() for p in (ROOT / "clawstream").iterdir() if p.is_symlink()}
    assert links == {name: ROOT / name for name in ALLOWED if name != "clawstream"}


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_follow_the_layout(path: Path) -> None:
    name = str(path.relative_to(ROOT))
    used = {module.partition(".")[0] for module in imports(path)}
    assert not (used & ALLOWED.keys()) - ALLOWED[name.partition("/")[0]], (
        f"{name} imports another process"
    )
    for library, files in ONLY_IN.items():
        assert library not in used or name in files, (
            f"{name} imports {library}; only {sorted(files)} may"
        )


def test_packages_import_each_other_without_a_cycle() -> None:
    order = TopologicalSorter(arrows())
    order.prepare()


def test_files_import_each_other_without_a_cycle() -> None:
    """Imports inside functions, for types only, and names of modules in strings count too."""
    order = TopologicalSorter(
        {name_of(path): imports(path) & MODULES - {name_of(path)} for path in FILES}
    )
    order.prepare()


def test_a_job_imports_no_other_job_and_the_worker_none() -> None:
    found = arrows()
    for package in [*JOBS, "stream_jobs.worker"]:
        assert not found[package] & (JOBS - {package}), package


def test_the_sdk_imports_only_what_its_own_wheel_has() -> None:
    found = {
        there
        for here, packages in arrows().items()
        if here.partition(".")[0] == "agent_flow"
        for there in packages
    }
    assert {there for there in found if not there.startswith("agent_flow.")} == {"schemas.numbers"}


def test_only_the_application_imports_the_compatibility_api() -> None:
    found = {package for package, used in arrows().items() if "gateway.claw_r1" in used}
    assert found <= {"gateway.app", "clawstream.cli"}


def test_no_folder_holds_more_than_twelve_modules() -> None:
    modules = defaultdict(int)
    for path in FILES:
        modules[path.parent] += path.name not in ("__init__.py", "__main__.py")
    assert not {str(folder.relative_to(ROOT)): n for folder, n in modules.items() if n > 12}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_file_is_named_by_a_noun(path: Path) -> None:
    assert path.stem not in {"utils", "helpers", "manager", "common", "misc"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        (
            "clawstream.cli.main",
            {"pydantic", "confluent_kafka", "rich", "torch", "faust", "duckdb"},
        ),
        ("schemas.codec.single_object", {"pydantic", "confluent_kafka", "torch"}),
        ("gateway.app", {"torch", "transformers", "faust", "deltalake", "vllm"}),
        (
            "stream_jobs.admit.main",
            {"torch", "transformers", "faust", "fastapi", "vllm", "deltalake"},
        ),
        ("stream_jobs.assemble.main", {"torch", "transformers", "fastapi", "vllm", "deltalake"}),
        ("stream_jobs.assemble.job", {"faust"}),
        ("stream_jobs.compare.main", {"torch", "transformers", "fastapi", "vllm", "deltalake"}),
        ("stream_jobs.compare.fold", {"faust", "confluent_kafka"}),
        (
            "clawstream.query.sandbox_launch",
            {"pydantic", "pyarrow", "duckdb", "deltalake", "confluent_kafka"},
        ),
        ("clawstream.query.sandbox", {"duckdb", "deltalake", "faust", "torch", "confluent_kafka"}),
        ("clawstream.query.sandbox_process", {"confluent_kafka", "structlog", "faust", "torch"}),
        ("clawstream.export.export", {"torch", "transformers", "faust", "vllm"}),
        ("rollout.main", {"torch", "vllm", "transformers", "faust", "fastapi"}),
        (
            "trainer.model.update",
            {
                *("confluent_kafka", "fsspec", "faust", "fastapi", "deltalake", "pyarrow", "vllm"),
                *("pydantic", "structlog", "msgspec", "orjson"),
            },
        ),
        (
            "agent_flow.main",
            {
                *("torch", "vllm", "confluent_kafka", "faust", "transformers"),
                *("numpy", "msgspec", "orjson", "fastavro"),
            },
        ),
    ],
)
def test_light_modules_stay_light(module: str, heavy: set[str]) -> None:
    name = module if module.startswith("clawstream.") else f"clawstream.{module}"
    code = f"import sys, {name}; print(' '.join({{m.partition('.')[0] for m in sys.modules}}))"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    assert not set(done.stdout.split()) & heavy


def test_no_init_files_under_tests() -> None:
    assert not list((ROOT / "tests").rglob("__init__.py"))
