"""The Kubernetes manifests: selectors, ports, probes and limits fit each other, and the configuration loads."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvproxy.operate.config.load import load_config
from kvproxy.operate.config.schema import Config
from tests.deploy.test_dockerfile import all_of, command

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
KUSTOMIZATION: dict[str, Any] = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
_VERSIONS = {
    "ServiceAccount": "v1",
    "ConfigMap": "v1",
    "Service": "v1",
    "Deployment": "apps/v1",
    "PodDisruptionBudget": "policy/v1",
    "NetworkPolicy": "networking.k8s.io/v1",
    "ServiceMonitor": "monitoring.coreos.com/v1",
}


def manifests() -> list[dict[str, Any]]:
    files = [path for path in sorted(FOLDER.rglob("*.yaml")) if path.name != "kustomization.yaml"]
    return [document for path in files for document in yaml.safe_load_all(path.read_text())]


def one(kind: str, name: str = "kvproxy") -> dict[str, Any]:
    (found,) = (m for m in manifests() if m["kind"] == kind and m["metadata"]["name"] == name)
    return found


DEPLOYMENT = one("Deployment")
POD: dict[str, Any] = DEPLOYMENT["spec"]["template"]["spec"]
LABELS: dict[str, str] = DEPLOYMENT["spec"]["template"]["metadata"]["labels"]
CONTAINER: dict[str, Any] = POD["containers"][0]
PORTS: dict[str, int] = {port["name"]: port["containerPort"] for port in CONTAINER["ports"]}


@pytest.fixture
def config() -> Config:
    """Return the configuration in the ConfigMap, with the secret's variable set."""
    return load_config(one("ConfigMap")["data"]["config.yaml"], env={"KVPROXY_ADMIN_TOKEN": "t"})


@pytest.mark.parametrize("manifest", manifests(), ids=lambda m: f"{m['kind']}/{m['metadata']['name']}")
def test_kinds_versions_and_names(manifest: dict[str, Any]) -> None:
    """Known kinds in their current version, DNS names, the recommended label, no namespace of its own."""
    assert manifest["apiVersion"] == _VERSIONS[manifest["kind"]]
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", manifest["metadata"]["name"])
    assert manifest["metadata"]["labels"]["app.kubernetes.io/name"] == "kvproxy"
    assert "namespace" not in manifest["metadata"]


def test_every_selector_finds_the_pods() -> None:
    """Deployment, services, budget, network policy and spread all mean the same pods."""
    selectors = [
        DEPLOYMENT["spec"]["selector"]["matchLabels"],
        one("Service")["spec"]["selector"],
        one("Service", "kvproxy-admin")["spec"]["selector"],
        one("PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        one("NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
        *(spread["labelSelector"]["matchLabels"] for spread in POD["topologySpreadConstraints"]),
    ]
    assert all(selector and selector.items() <= LABELS.items() for selector in selectors)


def test_ports_are_those_of_the_configuration(config: Config) -> None:
    """Named once on the container; everything else says the name."""
    assert {"http": config.listen.port, "admin": config.admin.port} == PORTS
    assert (config.listen.host, config.admin.host) == ("0.0.0.0", "0.0.0.0")
    targets = [port["targetPort"] for s in ("kvproxy", "kvproxy-admin") for port in one("Service", s)["spec"]["ports"]]
    allowed = [port["port"] for rule in one("NetworkPolicy")["spec"]["ingress"] for port in rule["ports"]]
    probed = [CONTAINER[f"{probe}Probe"]["httpGet"]["port"] for probe in ("startup", "liveness", "readiness")]
    assert set(targets) == set(allowed) == set(PORTS)
    assert set(probed) == {"admin"}
    assert one("Service", "kvproxy-admin")["spec"]["ports"][0]["port"] == config.admin.port


def test_probes_ask_what_they_mean() -> None:
    """Ready: requests may come. Alive: it answers at all, so that a fleet of dead engines restarts nothing."""
    assert CONTAINER["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert CONTAINER["livenessProbe"]["httpGet"]["path"] == "/healthz"
    assert CONTAINER["startupProbe"]["httpGet"]["path"] == "/healthz"


def test_the_admin_port_is_for_the_monitoring_namespace_alone() -> None:
    """The public port is open; no rule opens the admin port to all."""
    rules = {
        port["port"]: rule.get("from") for rule in one("NetworkPolicy")["spec"]["ingress"] for port in rule["ports"]
    }
    assert rules["http"] is None
    assert rules["admin"] == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    assert one("NetworkPolicy")["spec"]["policyTypes"] == ["Ingress"]


def test_it_passes_the_restricted_pod_security_standard() -> None:
    """And runs as the image's user on a read-only file system, without a token for the API."""
    pod, container = POD["securityContext"], CONTAINER["securityContext"]
    assert pod["runAsNonRoot"] is True
    assert all_of("USER") == [f"{pod['runAsUser']}:{pod['runAsGroup']}"]
    assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["allowPrivilegeEscalation"] is False
    assert container["capabilities"] == {"drop": ["ALL"]}
    assert container["readOnlyRootFilesystem"] is True
    assert POD["automountServiceAccountToken"] is False
    assert one("ServiceAccount")["metadata"]["name"] == POD["serviceAccountName"]
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(POD)


def test_the_configuration_is_mounted_where_the_image_looks() -> None:
    """The arguments are the image's own, and the ConfigMap's key is the file's name."""
    assert CONTAINER["args"] == command("CMD")
    folder, _, file = CONTAINER["args"][-1].rpartition("/")
    (mount,) = CONTAINER["volumeMounts"]
    assert mount["mountPath"] == folder
    assert file in one("ConfigMap")["data"]
    (volume,) = (volume for volume in POD["volumes"] if volume["name"] == mount["name"])
    assert volume["configMap"]["name"] == one("ConfigMap")["metadata"]["name"]


def test_the_token_is_the_secrets(config: Config) -> None:
    """One secret for the proxy and its scrapers."""
    (variable,) = CONTAINER["env"]
    assert variable["name"] == "KVPROXY_ADMIN_TOKEN"
    assert config.admin.token is not None
    assert config.admin.token.get_secret_value() == "t"
    scraping = one("ServiceMonitor")["spec"]["endpoints"][0]
    assert scraping["authorization"]["credentials"] == variable["valueFrom"]["secretKeyRef"]
    assert scraping["port"] in PORTS


def test_the_monitor_finds_the_admin_service_alone_and_calls_the_job_kvproxy() -> None:
    """The alert rules ask for job="kvproxy"."""
    spec = one("ServiceMonitor")["spec"]
    wanted = spec["selector"]["matchLabels"].items()
    services = [m for m in manifests() if m["kind"] == "Service" and wanted <= m["metadata"]["labels"].items()]
    assert [service["metadata"]["name"] for service in services] == ["kvproxy-admin"]
    assert services[0]["metadata"]["labels"][spec["jobLabel"]] == "kvproxy"


def test_there_is_time_to_finish(config: Config) -> None:
    """The grace period covers preStop and drain."""
    waits = re.search(r"sleep\((\d+)\)", CONTAINER["lifecycle"]["preStop"]["exec"]["command"][-1])
    assert waits is not None
    assert POD["terminationGracePeriodSeconds"] > int(waits[1]) + config.shutdown.drain


def test_one_proxy_is_always_there() -> None:
    """More replicas than the budget keeps, and an update takes none away before its successor is ready."""
    assert DEPLOYMENT["spec"]["replicas"] > one("PodDisruptionBudget")["spec"]["minAvailable"] > 0
    assert DEPLOYMENT["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
    assert {"cpu", "memory"} <= set(CONTAINER["resources"]["requests"])
    assert "memory" in CONTAINER["resources"]["limits"]


def test_engines_come_from_a_headless_service(config: Config) -> None:
    """Endpoints follow the pods; replicas of the proxy learn of each other's requests by KV events."""
    cluster = config.clusters["default"]
    assert cluster.discovery is not None
    assert cluster.discovery.dns is not None
    assert any(getattr(spec.settings, "kv_events", False) for spec in config.filters)


def test_the_kustomization_has_every_manifest_but_the_optional() -> None:
    """Nothing is forgotten, and what needs other custom resources is not applied unasked."""
    assert set(KUSTOMIZATION["resources"]) == {p.name for p in FOLDER.glob("*.yaml")} - {"kustomization.yaml"}
    assert KUSTOMIZATION["images"][0]["name"] == CONTAINER["image"]


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
def test_kubectl_builds_it() -> None:
    """`kubectl kustomize` renders all of it, with the image's name replaced."""
    built = subprocess.run(["kubectl", "kustomize", FOLDER], capture_output=True, text=True, check=True).stdout
    documents = list(yaml.safe_load_all(built))
    assert {d["kind"] for d in documents} == set(_VERSIONS) - {"ServiceMonitor"}
    image = KUSTOMIZATION["images"][0]
    assert f"image: {image['newName']}:{image['newTag']}" in built
