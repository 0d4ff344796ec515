"""Test images, docker-compose.yml and the guide, without a Docker engine."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.command_line import parse

from clawstream.ops.up import COMMANDS, wanted
from clawstream.runtime.broker.embedded import broker_of
from clawstream.runtime.process.config import load
from clawstream.schemas.settings import Settings

ROOT = Path(__file__).parents[3]
INFRA = ROOT / "infra"
SETTINGS = ("settings.yaml", "settings-cluster.yaml", "settings-s3.yaml")
BROKERS = ("kafka", "kafka-2", "kafka-3")
IN_CORE = (
    "clawstream.runtime.broker.foreground",
    "clawstream.gateway.main",
    "clawstream.stream_jobs.assemble.main",
    "clawstream.stream_jobs.reward.main",
    "clawstream.stream_jobs.compare.main",
    "clawstream.stream_jobs.admit.main",
    "clawstream.trainer.settings_check",
    "clawstream.stream_jobs.lake.main",
    "clawstream.ops.monitoring.exporter",
    "clawstream.export.export",
    "clawstream.schemas.conversation",
    "clawstream.query.live_lake",
    "clawstream.query.sandbox_process",
    "clawstream.query.token_texts",
    "clawstream.inspector.main",
    "clawstream.inspector.web.app",
)
"""What the processes and commands of the core image import."""
HIDING = """
import importlib, importlib.metadata, re, sys
owners = importlib.metadata.packages_distributions()
installed = set(sys.argv[1].split(","))
class Hiding:
    def find_spec(self, name, path=None, target=None):
        names = owners.get(name.partition(".")[0], ())
        if names and not installed & {re.sub("[-_.]+", "-", n).lower() for n in names}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Hiding())
for name in sys.argv[2:]:
    importlib.import_module(name)
"""


@cache
def services() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((INFRA / "docker-compose.yml").read_text())["services"]
    return found


def own() -> dict[str, Any]:
    """Return the services that run an image of ours."""
    return {n: s for n, s in services().items() if s["image"].startswith("clawstream-")}


def settings_of(service: str, file: str = "settings.yaml") -> Settings:
    """Return the settings of a service; values of the user's are left out."""
    environ = services()[service]["environment"]
    given = {k: v for k, v in environ.items() if v is not None and "$" not in v}
    return load(INFRA / file, (), given)


def listens(service: str, settings: Settings) -> int | None:
    """Return the port that the health check of a service should ask."""
    if service in BROKERS:
        plan = broker_of(settings.broker, settings.broker_dir).plan
        return plan.port
    process = service.removesuffix("-gpu")
    if process in ("gateway", "rollout"):
        section = settings.gateway if process == "gateway" else settings.rollout
        return section.port
    return settings.metrics.port_of(process)


def test_every_profile_is_described() -> None:
    profiles = {p for s in services().values() for p in s.get("profiles", ())}
    assert profiles == {"cluster", "s3", "compare", "learn", "gpu", "tracing", "monitoring", "ui"}
    guide = (ROOT / "docs" / "deployment.md").read_text()
    assert {p for p in profiles if f"| `{p}` |" not in guide} == set()


@pytest.mark.parametrize("service", own())
def test_the_command_exists_and_the_health_check_asks_its_port(service: str) -> None:
    described = services()[service]
    options = parse(described["command"])
    file = "settings-cluster.yaml" if service in BROKERS[1:] else "settings.yaml"
    port = listens(service, settings_of(service, file)) or options["port"]
    test = described["healthcheck"]["test"]
    assert re.search(rf"(^|:){port}(/|$)", test[-1]), test


def test_images_are_pinned_and_every_container_has_a_health_check() -> None:
    for name, service in services().items():
        assert service["healthcheck"]["test"], name
        assert service["restart"] == "unless-stopped", "it comes back after a planned reboot"
        assert name in own() or re.search(r":v?\d+\.\d+\.\d+$", service["image"]), name


def test_the_images_have_every_package_and_their_locks_exist() -> None:
    dockerfile = (INFRA / "Dockerfile").read_text()
    targets = set(re.findall(r"^FROM base AS (\w+)$", dockerfile, re.MULTILINE))
    assert targets == {s["build"]["target"] for s in own().values()}
    for target in targets:
        assert {s["image"] for s in own().values() if s["build"]["target"] == target} == {
            f"clawstream-{target}"
        }
    for lock in re.findall(r"^COPY (\S+\.(?:lock|txt)) ", dockerfile, re.MULTILINE):
        assert (ROOT / lock).is_file(), lock
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    links = [link.name for link in (ROOT / "clawstream").iterdir() if link.is_symlink()]
    copied = (ROOT / ".dockerignore").read_text().split()
    assert [name for name in [*packages, *links] if f"!{name}" not in copied] == []


def test_the_files_of_settings_differ_in_what_their_profile_adds() -> None:
    base, cluster, s3 = (settings_of("lake", file) for file in SETTINGS)
    assert (base.bootstrap_servers, base.replication) == ("kafka:19092", (1, 1))
    assert cluster.bootstrap_servers == "kafka:19092,kafka-2:19102,kafka-3:19112"
    assert cluster.replication == (3, 2)
    hosts = base.broker.model_copy(update={"hosts": BROKERS})
    assert cluster == base.model_copy(update={"broker": hosts})
    for uri in (s3.lake_uri, s3.blob_uri, s3.weights_uri, s3.checkpoint_uri):
        assert str(uri).startswith("s3://clawstream/")
    update = {"lake": base.lake, "trainer": base.trainer, "gateway": base.gateway}
    assert s3.model_copy(update=update) == base


def test_brokers_have_the_names_of_the_cluster() -> None:
    for service in BROKERS:
        assert settings_of(service).broker.advertised_host == service


def test_the_object_store_of_the_profile_is_the_one_of_its_settings() -> None:
    lines = (INFRA / "s3.env").read_text().splitlines()
    given = dict(line.split("=", 1) for line in lines if not line.startswith("#"))
    environment = services()["s3"]["environment"]
    port = environment["S3PROXY_ENDPOINT"].rpartition(":")[2]
    assert given["SETTINGS"] == "./settings-s3.yaml"
    assert given["AWS_ENDPOINT_URL"] == f"http://s3:{port}"
    options = settings_of("lake", "settings-s3.yaml").lake.storage_options
    assert options["AWS_ENDPOINT_URL"] == given["AWS_ENDPOINT_URL"]
    assert given.keys() - {"SETTINGS"} <= services()["gateway"]["environment"].keys()


def test_the_guide_for_three_machines_starts_each_process_once(tmp_path: Path) -> None:
    guide = (ROOT / "docs" / "deployment.md").read_text().partition("## Three machines")[2]
    (described,) = re.findall(r"```yaml\n(.*?)```", guide, re.DOTALL)
    file = tmp_path / "settings.yaml"
    file.write_text(described)
    started: list[str] = []
    for words in re.findall(r"^    \w\$ clawstream (.*)$", guide, re.MULTILINE):
        given = parse(shlex.split(words))
        if words.startswith("up "):
            settings = load(file, given["overrides"], {})
            assert settings.bootstrap_servers == "a.internal:19092"
            assert {*settings.up.processes} - {*wanted(settings)} <= {
                "compare",
                "traces",
            }  # need a judge, a collector
            started += settings.up.processes
    assert sorted(started) == sorted(COMMANDS)


@pytest.mark.slow
def test_the_core_image_has_what_its_processes_import() -> None:
    """Modules of packages outside core.lock are hidden, as torch is."""
    lock = (ROOT / "requirements" / "core.lock").read_text()
    installed = {"clawstream", *re.findall(r"^([a-z0-9.-]+)(?:\[[^\]]*\])?==", lock, re.MULTILINE)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", HIDING, ",".join(installed), *IN_CORE],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
