"""Test the Kubernetes manifests without a cluster or a schema: names, commands, ports, settings.

`make test-kubernetes` validates them against the published schemas.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.command_line import parse

from clawstream.gateway.auth.session_keys import SECRET_BYTES
from clawstream.ops.up import COMMANDS
from clawstream.runtime.broker.node_config import LARGEST_MESSAGE_BYTES
from clawstream.runtime.process.config import load
from clawstream.schemas.settings import Settings

ROOT = Path(__file__).parents[3]
MANIFESTS = ROOT / "infra" / "kubernetes"
COMPONENT = "app.kubernetes.io/component"
POD = "a-pod-0"
FROM_CLUSTER = {
    "CLAWSTREAM__LAKE__WRITER": "0",
    "CLAWSTREAM__GATEWAY__SESSION_SECRET": "x" * SECRET_BYTES,
}
"""Values of environment variables that the cluster knows."""
Tree = dict[str, Any]


def read(name: str) -> Tree:
    tree: Tree = yaml.safe_load((MANIFESTS / name).read_text())
    return tree


@cache
def objects() -> list[Tree]:
    names = read("kustomization.yaml")["resources"]
    return [o for n in names for o in yaml.safe_load_all((MANIFESTS / n).read_text())]


def of_kind(*kinds: str) -> list[Tree]:
    return [o for o in objects() if o["kind"] in kinds]


WORKLOADS = {o["metadata"]["name"]: o for o in of_kind("Deployment", "StatefulSet")}
PROCESSES = sorted(WORKLOADS)


def pod(name: str) -> Tree:
    spec: Tree = WORKLOADS[name]["spec"]["template"]["spec"]
    return spec


def container(name: str) -> Tree:
    (found,) = pod(name)["containers"]
    return dict(found)


def patches(name: str) -> list[Tree]:
    """Return the specs of the pod that are added to a process."""
    files = ["process.yaml", *(["learn.yaml"] if name in ("trainer", "rollout") else [])]
    return [read(file)["spec"]["template"]["spec"] for file in files]


def settings_of(name: str) -> Settings:
    """Return the settings that a process loads."""
    environ = {}
    for variable in [*patches(name)[0]["containers"][0]["env"], *container(name).get("env", [])]:
        value = variable.get("value") or FROM_CLUSTER.get(variable["name"], "")
        environ[variable["name"]] = value.replace("$(POD_NAME)", POD)
    return load(MANIFESTS / "settings.yaml", (), environ)


def ports(name: str) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container(name)["ports"]}


def test_every_process_and_every_file_is_there() -> None:
    assert set(PROCESSES) == {*COMMANDS, "inspector"} - {"broker"}
    made = read("kustomization.yaml")
    used = {*made["resources"], *made["configMapGenerator"][0]["files"], "kustomization.yaml"}
    used |= {patch["path"] for patch in made["patches"]}
    assert {path.name for path in MANIFESTS.iterdir()} == used


@pytest.mark.parametrize("name", PROCESSES)
class TestProcess:
    def test_the_command_exists(self, name: str) -> None:
        options = parse(container(name)["args"])
        mounts = {
            m["name"]: m["mountPath"] for m in patches(name)[0]["containers"][0]["volumeMounts"]
        }
        (settings,) = read("kustomization.yaml")["configMapGenerator"][0]["files"]
        assert str(options["config"]) == f"{mounts['settings']}/{settings}"
        images = {image["name"] for image in read("kustomization.yaml")["images"]}
        assert container(name)["image"] in images and container(name)["name"] == "clawstream"

    def test_labels_agree(self, name: str) -> None:
        workload = WORKLOADS[name]
        labels = {COMPONENT: name}
        assert workload["metadata"]["labels"] == labels
        assert workload["spec"]["selector"]["matchLabels"] == labels
        assert workload["spec"]["template"]["metadata"]["labels"] == labels

    def test_the_ports_are_those_of_the_settings(self, name: str) -> None:
        settings = settings_of(name)
        expected = {
            "http": {
                "gateway": settings.gateway.port,
                "rollout": settings.rollout.port,
                "inspector": parse(container(name)["args"]).get("port"),
            }.get(name),
            "metrics": settings.metrics.port_of(name),
        }
        assert ports(name) == {k: v for k, v in expected.items() if v is not None}
        annotations = WORKLOADS[name]["spec"]["template"]["metadata"]["annotations"]
        scraped = ports(name).get("metrics", ports(name).get("http"))
        assert annotations["prometheus.io/port"] == str(scraped)

    def test_the_probes_ask_a_port_of_the_process(self, name: str) -> None:
        probes = [v["httpGet"] for k, v in container(name).items() if k.endswith("Probe")]
        path = {"gateway": "/health", "rollout": "/health", "inspector": "/login"}.get(name)
        assert probes
        for probe in probes:
            assert probe["port"] in ports(name)
            assert probe["path"] == (path or "/metrics")

    def test_every_mount_has_a_volume(self, name: str) -> None:
        specs = [pod(name), *patches(name)]
        claims = WORKLOADS[name]["spec"].get("volumeClaimTemplates", [])
        volumes = [v["name"] for spec in specs for v in spec.get("volumes", ())]
        volumes += [claim["metadata"]["name"] for claim in claims]
        inside = [c for s in specs for c in [*s["containers"], *s.get("initContainers", ())]]
        mounted = {m["name"] for c in inside for m in c.get("volumeMounts", ())}
        assert mounted == set(volumes) and len(volumes) == len(set(volumes))

    def test_it_knows_its_own_name(self, name: str) -> None:
        settings = settings_of(name)
        assert settings.jobs.worker_id == settings.gateway.gateway_id == POD
        assert settings.rollout.worker_id == POD
        if name == "rollout":
            (headless,) = (o for o in of_kind("Service") if o["spec"].get("clusterIP") == "None")
            service = headless["metadata"]["name"]
            assert WORKLOADS[name]["spec"]["serviceName"] == service
            assert settings.rollout.public_url == f"http://{POD}.{service}:{settings.rollout.port}"

    def test_it_asks_for_memory(self, name: str) -> None:
        resources = container(name)["resources"]
        assert resources["requests"].keys() >= {"cpu", "memory"} and "memory" in resources["limits"]


def test_everything_else_selects_a_process() -> None:
    for found in of_kind("Service", "PodDisruptionBudget", "NetworkPolicy"):
        spec = found["spec"]
        selector = spec.get("selector") or spec["podSelector"]
        name = selector.get("matchLabels", selector).get(COMPONENT)
        if found["kind"] == "Service":
            used = [port.get("targetPort") for port in spec["ports"]]
        else:
            rules = spec.get("ingress", ())
            used = [port["port"] for rule in rules for port in rule["ports"]]
        assert name in WORKLOADS or found["metadata"]["name"] == "processes"
        assert {port for port in used if port is not None} <= set(ports(name) if name else ())
    for scaler in of_kind("HorizontalPodAutoscaler"):
        target = scaler["spec"]["scaleTargetRef"]
        workload = WORKLOADS[target["name"]]
        assert (target["kind"], target["apiVersion"]) == (workload["kind"], workload["apiVersion"])
        assert "replicas" not in workload["spec"], "every `apply` would reset the number"


def test_what_must_run_once_runs_once() -> None:
    settings = settings_of("lake")
    for name in ("admit", "trainer"):
        assert WORKLOADS[name]["kind"] == "StatefulSet" and WORKLOADS[name]["spec"]["replicas"] == 1
    assert WORKLOADS["lake"]["spec"]["replicas"] == settings.lake.writers
    assert WORKLOADS["assemble"]["spec"]["replicas"] <= settings.kafka.partitions
    assert WORKLOADS["compare"]["spec"]["replicas"] == settings.jobs.compares_groups


def test_the_processes_log_in_to_the_brokers() -> None:
    (kafka,), (user,), (pool,) = (of_kind(k) for k in ("Kafka", "KafkaUser", "KafkaNodePool"))
    cluster, login = kafka["metadata"]["name"], user["metadata"]["name"]
    (listener,) = kafka["spec"]["kafka"]["listeners"]
    settings = settings_of("lake").kafka
    assert settings.bootstrap_servers == f"{cluster}-kafka-bootstrap:{listener['port']}"
    security = settings.security
    assert (security.protocol, listener["tls"]) == ("sasl_ssl", True)
    assert security.mechanism.lower() == listener["authentication"]["type"]
    assert security.user == login and user["spec"]["authentication"] == listener["authentication"]
    common = patches("lake")[0]
    mounts = {m["mountPath"]: m["name"] for m in common["containers"][0]["volumeMounts"]}
    secrets = {v["name"]: v.get("secret", {}).get("secretName") for v in common["volumes"]}
    for path, name, key in (
        (security.password_file, login, "password"),
        (security.ca_file, f"{cluster}-cluster-ca-cert", "ca.crt"),
    ):
        assert path is not None and path.name == key
        assert secrets[mounts[str(path.parent)]] == name
    for named in (user, pool):
        assert named["metadata"]["labels"] == {"strimzi.io/cluster": cluster}
    assert pool["spec"]["replicas"] == settings.replication_factor


def test_the_brokers_keep_what_clawstream_needs() -> None:
    (kafka,), (user,) = of_kind("Kafka"), of_kind("KafkaUser")
    config = kafka["spec"]["kafka"]["config"]
    assert config["message.max.bytes"] == LARGEST_MESSAGE_BYTES
    assert config["replica.fetch.max.bytes"] == LARGEST_MESSAGE_BYTES
    assert config["auto.create.topics.enable"] is False
    assert "topicOperator" not in kafka["spec"]["entityOperator"], "topics are Clawstream's"
    prefix = settings_of("lake").kafka.topic_prefix
    allowed = {a["resource"]["type"]: a["resource"] for a in user["spec"]["authorization"]["acls"]}
    assert allowed.keys() == {"topic", "group", "transactionalId"}
    assert all(prefix.startswith(r["name"]) for r in allowed.values())


def test_the_guide_says_how_to_make_every_secret() -> None:
    guide = (ROOT / "docs" / "deployment.md").read_text()
    for name in PROCESSES:
        for spec in [pod(name), *patches(name)]:
            for volume in spec.get("volumes", ()):
                secret = volume.get("secret", {}).get("secretName")
                assert secret is None or f"`{secret}`" in guide
    for words in ("`clawstream-s3`", "--from-file=api-keys.json", "--from-literal=session-secret"):
        assert words in guide
