"""The manifests of docs/deploy fit the schema of Kubernetes, each other, and the command that they start."""

import re
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from colossalai.cli._main import main

pytestmark = pytest.mark.unit
FOLDER = Path(__file__).parents[2] / "docs/deploy"
DOCUMENTS = list(yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text()))
BY_KIND = {document["kind"]: document for document in DOCUMENTS}
POD = BY_KIND["Deployment"]["spec"]["template"]["spec"]
(SERVER,) = POD["containers"]
OPTIONS = dict(word.lstrip("-").split("=") for word in SERVER["args"] if "=" in word)


def test_the_manifests_fit_the_schema():
    validator = pytest.importorskip("kubernetes_validate", reason="not installed: kubernetes-validate")
    assert list(BY_KIND) == ["Secret", "Service", "Deployment", "HorizontalPodAutoscaler"]
    for document in DOCUMENTS:
        validator.validate(document, validator.latest_version(), strict=True)
    broken = yaml.safe_load(yaml.safe_dump(BY_KIND["HorizontalPodAutoscaler"]))
    broken["spec"]["metrics"][0]["pods"]["target"]["averageValues"] = "8"
    with pytest.raises(validator.ValidationError):
        validator.validate(broken, validator.latest_version(), strict=True)


def test_the_parts_find_each_other():
    labels = BY_KIND["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert BY_KIND["Deployment"]["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert BY_KIND["Service"]["spec"]["selector"].items() <= labels.items()
    (port,) = BY_KIND["Service"]["spec"]["ports"]
    (served,) = SERVER["ports"]
    assert port["targetPort"] == served["name"]
    assert str(served["containerPort"]) == OPTIONS["port"]
    target = BY_KIND["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", BY_KIND["Deployment"]["metadata"]["name"])
    assert "replicas" not in BY_KIND["Deployment"]["spec"]  # else each apply would undo the autoscaler
    volumes = {volume["name"]: volume for volume in POD["volumes"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in SERVER["volumeMounts"]}
    assert set(mounts) == set(volumes)
    assert volumes["api-key"]["secret"]["secretName"] == BY_KIND["Secret"]["metadata"]["name"]
    (file,) = BY_KIND["Secret"]["stringData"]
    assert OPTIONS["api-key-file"] == f"{mounts['api-key']}/{file}"


def test_the_command_takes_the_arguments():
    described = CliRunner().invoke(main, ["serve", "--help"]).output
    assert SERVER["command"] == ["colossalai", "serve"]
    given = [word.partition("=")[0] for word in SERVER["args"] if word.startswith("--")]
    for option in given:
        assert re.search(rf"{option}\b", described), option
    assert "--no-auth" not in given


def test_a_pod_has_time_to_finish():
    pause = int(SERVER["lifecycle"]["preStop"]["exec"]["command"][1])
    assert POD["terminationGracePeriodSeconds"] >= pause + float(OPTIONS["drain"]) + 30
    paths = {name: SERVER[name]["httpGet"]["path"] for name in SERVER if name.endswith("Probe")}
    assert paths == {"startupProbe": "/ready", "readinessProbe": "/ready", "livenessProbe": "/health"}


def test_the_metric_is_one_that_the_server_has():
    (metric,) = BY_KIND["HorizontalPodAutoscaler"]["spec"]["metrics"]
    name = metric["pods"]["metric"]["name"]
    source = Path(__file__).parents[2] / "colossalai/serving/_metrics.py"
    assert f'"{name}"' in source.read_text()
    rules = yaml.safe_load((FOLDER / "prometheus_adapter.yaml").read_text())["rules"]
    (rule,) = rules["custom"]
    assert rule["name"]["as"] == name
    assert rule["seriesQuery"].startswith(name)
    assert re.fullmatch(rule["name"]["matches"], name)
    annotations = BY_KIND["Deployment"]["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == OPTIONS["port"]
    assert "--open-metrics" in SERVER["args"]  # Prometheus has no key here
