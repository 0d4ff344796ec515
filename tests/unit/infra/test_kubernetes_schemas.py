"""Validate the rendered Kubernetes manifests against the published schemas.

`make test-kubernetes` installs what is needed: the schemas of Kubernetes, and the generator of the
schemas of Strimzi's resources.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator

from clawstream.runtime.broker.jars import ensure_jars, find_java, parse_pins

pytest.importorskip("kubernetes_validate", reason="make test-kubernetes installs the schemas")
KUBECTL = shutil.which("kubectl")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(KUBECTL is None, reason="kubectl renders the manifests"),
]
ROOT = Path(__file__).parents[3]
KUBERNETES = "1.37"
GENERATOR = "io.strimzi.crdgenerator.CrdGenerator"
MODEL = "io.strimzi.api.kafka.model"
STRIMZI = {
    "Kafka": f"{MODEL}.kafka.Kafka",
    "KafkaNodePool": f"{MODEL}.nodepool.KafkaNodePool",
    "KafkaUser": f"{MODEL}.user.KafkaUser",
}
"""Kinds of Strimzi, and the classes from which their schemas are made."""
Tree = dict[str, Any]


@cache
def objects() -> tuple[Tree, ...]:
    """Return everything that `kubectl apply -k` sends."""
    assert KUBECTL is not None
    done = subprocess.run(
        [KUBECTL, "kustomize", ROOT / "infra" / "kubernetes"], capture_output=True, check=True
    )
    return tuple(yaml.safe_load_all(done.stdout))


def is_strimzi(found: Tree) -> bool:
    return str(found["apiVersion"]).startswith("kafka.strimzi.io/")


def closed(schema: Any) -> Any:
    """Return a schema that refuses the fields that it does not name, as `kubectl apply` does."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {name: closed(part) for name, part in schema.items()}
    is_open = schema.get("x-kubernetes-preserve-unknown-fields", False)
    if schema.get("type") == "object" and "properties" in schema and not is_open:
        inner["additionalProperties"] = False
    return inner


def test_kubernetes_knows_every_field() -> None:
    from kubernetes_validate import validate

    checked = [found for found in objects() if not is_strimzi(found)]
    for found in checked:
        validate(found, KUBERNETES, strict=True)
    assert {found["kind"] for found in checked} >= {"StatefulSet", "Deployment", "NetworkPolicy"}


def test_strimzi_knows_every_field(tmp_path: Path) -> None:
    pins = parse_pins((ROOT / "requirements" / "strimzi.txt").read_text())
    jars = ensure_jars(ROOT / ".cache" / "kubernetes" / "strimzi", pins)
    classes = [f"{name}={tmp_path / kind}.yaml" for kind, name in STRIMZI.items()]
    command = [find_java().executable, "-cp", f"{jars}/*", GENERATOR, "--yaml", *classes]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    checked = [found for found in objects() if is_strimzi(found)]
    for found in checked:
        definition = yaml.safe_load((tmp_path / f"{found['kind']}.yaml").read_text())
        versions = {f"kafka.strimzi.io/{v['name']}": v for v in definition["spec"]["versions"]}
        schema = closed(versions[found["apiVersion"]]["schema"]["openAPIV3Schema"])
        schema["properties"]["metadata"] = {}
        errors = [f"{e.json_path}: {e.message}" for e in Draft7Validator(schema).iter_errors(found)]
        assert errors == []
    assert {found["kind"] for found in checked} == STRIMZI.keys()


def pods() -> dict[str, Tree]:
    kinds = ("Deployment", "StatefulSet")
    found = [o for o in objects() if o["kind"] in kinds]
    return {o["metadata"]["name"]: o["spec"]["template"]["spec"] for o in found}


def test_pods_meet_the_standard_restricted() -> None:
    for spec in pods().values():
        security = spec["securityContext"]
        assert security["runAsNonRoot"] is True and security["runAsUser"] == 10001
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        for container in [*spec["containers"], *spec.get("initContainers", ())]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


def test_variables_are_defined_before_they_are_used() -> None:
    for spec in pods().values():
        (container,) = spec["containers"]
        known = set()
        for variable in container["env"]:
            assert set(re.findall(r"\$\((\w+)\)", variable.get("value", ""))) <= known
            known.add(variable["name"])
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        assert volumes["settings"]["configMap"]["name"].startswith("clawstream-settings-")
