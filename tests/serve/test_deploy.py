"""The manifests for Kubernetes, against the schemas that come with the packages of both projects."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

DEPLOY = Path(__file__).parents[2] / "packages" / "nitro-serve" / "deploy"

CHECK = """
import re, sys
import yaml
import kserve.models, kubernetes.client.models

def find(kind):
    for module in (kserve.models, kubernetes.client.models):
        if hasattr(module, kind):
            return getattr(module, kind)

def check(value, kind, where):
    inner = re.fullmatch(r"(?:list\\[|dict\\(str, )(.+)[\\])]", kind)
    if inner:
        children = enumerate(value) if kind.startswith("list") else value.items()
        for key, child in children:
            check(child, inner[1], f"{where}.{key}")
        return
    schema = find(kind)
    if schema is None:
        scalars = {"str": str, "int": int, "bool": bool}
        if kind in scalars and type(value) is not scalars[kind]:
            print(f"{where}: {value!r} is no {kind}")
        return
    names = {wire: name for name, wire in schema.attribute_map.items()}
    for key, child in value.items():
        if key not in names:
            print(f"{where}: {kind} has no {key}")
        else:
            check(child, schema.openapi_types[names[key]], f"{where}.{key}")

KINDS = {
    ("serving.kserve.io/v1alpha1", "ClusterServingRuntime"): "V1alpha1ClusterServingRuntime",
    ("serving.kserve.io/v1beta1", "InferenceService"): "V1beta1InferenceService",
}
for path in sys.argv[1:]:
    for document in yaml.safe_load_all(open(path)):
        check(document, KINDS[document["apiVersion"], document["kind"]], path.rpartition("/")[2])
"""


def _problems(*files: Path) -> list[str]:
    # In a process of its own: the messages of kserve and tritonclient clash.
    command = [sys.executable, "-W", "ignore", "-c", CHECK, *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_manifests_fit_the_schemas():
    if importlib.util.find_spec("kserve") is None:
        pytest.skip("needs kserve: uv sync --group serve")
    files = sorted(DEPLOY.glob("*.yaml"))

    assert len(files) == 3
    assert _problems(*files) == []


def test_a_mistake_in_a_manifest_is_found(tmp_path):
    if importlib.util.find_spec("kserve") is None:
        pytest.skip("needs kserve: uv sync --group serve")
    text = (DEPLOY / "inference-service.yaml").read_text()
    changed = tmp_path / "service.yaml"
    changed.write_text(
        text.replace("storageUri", "storageUrl").replace("maxReplicas: 8", "maxReplicas: x")
    )

    assert _problems(changed) == [
        "service.yaml.spec.predictor.maxReplicas: 'x' is no int",
        "service.yaml.spec.predictor.model: V1beta1ModelSpec has no storageUrl",
    ]
