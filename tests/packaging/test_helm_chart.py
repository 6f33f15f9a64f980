"""The Helm chart, rendered by Helm's own engine: what it makes fits Kubernetes, itself, and the plain manifests."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvproxy.base.settings.compose import part_of
from kvproxy.cli import main
from kvproxy.features.kubernetes.settings import KubernetesPlace
from kvproxy.operate.config.load import load_config
from tests.deploy import test_kubernetes as plain
from tests.deploy.promql import SERIES
from tests.deploy.test_helm_values import CHART, VALUES
from tests.docs.blocks import blocks
from tests.packaging.test_manifest_schemas import validated

pytestmark = pytest.mark.packaging

Manifests = dict[tuple[str, str], dict[str, Any]]
EVERYTHING: dict[str, Any] = {
    "autoscaling": {"kind": "keda", "minReplicas": 0},
    "ingress": {"enabled": True, "className": "nginx", "host": "llm.example", "tlsSecret": "llm-tls"},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "prometheusRule": {"enabled": True},
    "rbac": {"namespaces": ["models", "more-models"]},
    "workers": 4,
    "drainSeconds": 300,
    "env": [{"name": "X", "value": "y"}],
    "nodeSelector": {"pool": "cpu"},
    "tolerations": [{"key": "x", "operator": "Exists"}],
}
#: What excludes something of these, or is off by itself; and what may be left out is.
OTHERWISE: dict[str, Any] = {
    "autoscaling": {"kind": "hpa"},
    "httpRoute": {
        "enabled": True,
        "parentRefs": [{"name": "gw", "sectionName": "https"}],
        "hostnames": ["llm.example"],
    },
    "admin": {"existingSecret": "mine", "port": 9000},
    "serviceAccount": {"create": False, "name": "theirs", "annotations": {"a": "b"}},
    "rbac": {"create": False},
    "networkPolicy": {"enabled": False},
    "podDisruptionBudget": {"enabled": False},
    "service": {"type": "LoadBalancer", "port": 8080, "annotations": {"a": "b"}},
    "imagePullSecrets": [{"name": "pull"}],
    "envFrom": [{"secretRef": {"name": "keys"}}],
    "affinity": {"nodeAffinity": {}},
    "podAnnotations": {"a": "b"},
}
CUSTOM = {"ServiceMonitor", "PrometheusRule", "ScaledObject", "HTTPRoute"}  # not Kubernetes' own


def render(values: dict[str, Any] | None = None, *, name: str = "kvproxy") -> Manifests:
    """Everything the chart makes, by kind and name (RBAC by its namespace too)."""
    import helm_python  # only the packaging environment has it

    with helm_python.Chart.load(CHART) as chart:
        rendered = chart.render(values or {}, name=name, namespace="models")
    found: Manifests = {}
    for path, text in rendered.items():
        for one in yaml.safe_load_all(text) if path.endswith(".yaml") else ():
            if one is not None:
                namespace = one["metadata"].get("namespace", "")
                key = one["kind"], f"{namespace}/{one['metadata']['name']}".lstrip("/")
                assert key not in found
                found[key] = one
    return found


def pod_of(found: Manifests, name: str = "kvproxy") -> dict[str, Any]:
    pod: dict[str, Any] = found["Deployment", name]["spec"]["template"]["spec"]
    return pod


CASES = pytest.mark.parametrize("values", [{}, EVERYTHING, OTHERWISE], ids=["defaults", "everything", "otherwise"])


@CASES
def test_helm_has_nothing_to_say_about_it(values: dict[str, Any]) -> None:
    """But that there is no icon."""
    import helm_python

    report = helm_python.lint(CHART, values, strict=True)
    assert report["errors"] == []
    assert [one["error"] for one in report["messages"]] == ["icon is recommended"]


@CASES
def test_made_bodies_fit_the_api(values: dict[str, Any]) -> None:
    """Names, types and required fields, at every depth, by the API's own models."""
    for (kind, name), one in render(values).items():
        if kind not in CUSTOM:
            assert validated(kind, one) == one, (kind, name)


@CASES
def test_named_objects_exist(values: dict[str, Any]) -> None:
    """Ports of services and routes, secrets, accounts, the configuration's volume, metrics of queries."""
    found = render(values)
    pod = pod_of(found)
    (container,) = pod["containers"]
    open_ports = {port["name"] for port in container["ports"]}
    probes = [container[f"{kind}Probe"]["httpGet"]["port"] for kind in ("startup", "liveness", "readiness")]
    services = {name: one["spec"]["ports"] for (kind, name), one in found.items() if kind == "Service"}
    assert {port["targetPort"] for ports in services.values() for port in ports} | {*probes} <= open_ports
    for kind, name in found:
        text = yaml.safe_dump(found[kind, name])
        assert not [one for one in re.findall(r"kvproxy_[a-z_]+", text) if one not in SERIES], kind
    if (route := found.get(("HTTPRoute", "kvproxy"))) is not None:
        (backend,) = route["spec"]["rules"][0]["backendRefs"]
        assert backend["port"] in [port["port"] for port in services[backend["name"]]]
    admin = {**VALUES["admin"], **values.get("admin", {})}["existingSecret"]
    (token, *_) = container["env"]
    assert (admin or "kvproxy-admin") == token["valueFrom"]["secretKeyRef"]["name"]
    assert bool(admin) is (("Secret", "kvproxy-admin") not in found)
    account = pod["serviceAccountName"]
    assert (("ServiceAccount", account) in found) is (account != "theirs")
    assert pod["volumes"][0]["configMap"]["name"] in [name for kind, name in found if kind == "ConfigMap"]


@CASES
def test_check_has_nothing_against_the_configuration(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`kvproxy check` of what is mounted, with what the pod has in its environment."""
    found = render(values)
    path = tmp_path / "config.yaml"
    path.write_text(found["ConfigMap", "kvproxy"]["data"]["config.yaml"])
    for variable in pod_of(found)["containers"][0]["env"]:
        monkeypatch.setenv(variable["name"], "x")
    assert main(["check", str(path)]) == 0


def test_every_selector_finds_the_pods_and_every_port_is_named() -> None:
    """Of another release too, whose name does not contain the chart's."""
    found = render(EVERYTHING, name="edge")
    deployment = found["Deployment", "edge-kvproxy"]
    labels = deployment["spec"]["template"]["metadata"]["labels"].items()
    spread = pod_of(found, "edge-kvproxy")["topologySpreadConstraints"][0]
    selectors = [
        deployment["spec"]["selector"]["matchLabels"],
        found["Service", "edge-kvproxy"]["spec"]["selector"],
        found["Service", "edge-kvproxy-admin"]["spec"]["selector"],
        found["PodDisruptionBudget", "edge-kvproxy"]["spec"]["selector"]["matchLabels"],
        found["NetworkPolicy", "edge-kvproxy"]["spec"]["podSelector"]["matchLabels"],
        spread["labelSelector"]["matchLabels"],
    ]
    assert all(selector and selector.items() <= labels for selector in selectors)
    monitored = found["ServiceMonitor", "edge-kvproxy"]["spec"]["selector"]["matchLabels"].items()
    services = [
        name
        for (kind, name), one in found.items()
        if kind == "Service" and monitored <= one["metadata"]["labels"].items()
    ]
    assert services == ["edge-kvproxy-admin"]


def test_the_admin_port_is_not_on_the_public_service() -> None:
    """Nor open to others than the policy names."""
    found = render()
    assert [port["targetPort"] for port in found["Service", "kvproxy"]["spec"]["ports"]] == ["http"]
    rules = found["NetworkPolicy", "kvproxy"]["spec"]["ingress"]
    assert [(rule["ports"][0]["port"], "from" in rule) for rule in rules] == [("http", False), ("admin", True)]
    closed = render({"networkPolicy": {"adminFrom": []}})["NetworkPolicy", "kvproxy"]["spec"]["ingress"]
    assert [rule["ports"][0]["port"] for rule in closed] == ["http"]


def test_the_configuration_loads_and_agrees_with_the_pod() -> None:
    """Ports, drain against the grace period, the secret's variable."""
    found = render(EVERYTHING)
    config = load_config(found["ConfigMap", "kvproxy"]["data"]["config.yaml"], env={"KVPROXY_ADMIN_TOKEN": "t"})
    pod = pod_of(found)
    (container,) = pod["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": config.listen.port, "admin": config.admin.port}
    assert config.shutdown.drain == 300
    assert pod["terminationGracePeriodSeconds"] == 315
    assert container["args"][-1] == "--workers=4"
    kubernetes = part_of(config.clusters["default"].discovery, KubernetesPlace).kubernetes
    assert kubernetes is not None
    assert (kubernetes.service, kubernetes.namespace) == ("vllm", "")
    assert config.clusters["default"].queue.enabled


def test_the_account_may_read_what_discovery_reads_and_nothing_else() -> None:
    """In each namespace that is named, for the account of the pod."""
    found = render(EVERYTHING)
    for namespace in ("models", "more-models"):
        rules = found["Role", f"{namespace}/kvproxy-discovery"]["rules"]
        assert {tuple(rule["resources"]): rule["verbs"] for rule in rules} == {
            ("endpointslices",): ["get", "list", "watch"],
            ("pods",): ["get", "list", "watch"],
        }
        binding = found["RoleBinding", f"{namespace}/kvproxy-discovery"]
        assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "kvproxy", "namespace": "models"}]
        assert binding["roleRef"]["name"] == "kvproxy-discovery"
    assert pod_of(found)["serviceAccountName"] == "kvproxy"
    assert pod_of(found)["automountServiceAccountToken"] is True
    assert pod_of(render({"rbac": {"create": False}}))["automountServiceAccountToken"] is False


def test_it_is_as_confined_and_probed_as_the_plain_manifests() -> None:
    """One idea of a good pod."""
    pod, (container,) = pod_of(render()), pod_of(render())["containers"]
    for key in ("securityContext", "startupProbe", "livenessProbe", "readinessProbe", "lifecycle", "resources"):
        assert container[key] == plain.CONTAINER[key]
    assert pod["securityContext"] == plain.POD["securityContext"]
    assert pod["terminationGracePeriodSeconds"] == plain.POD["terminationGracePeriodSeconds"]


def test_the_token_is_made_once_or_is_yours() -> None:
    """48 letters; with a secret of your own there is no other."""
    found = render()
    assert ("Secret", "kvproxy-admin") in found
    mine = render({"admin": {"existingSecret": "mine"}, "serviceMonitor": {"enabled": True}})
    assert not [name for kind, name in mine if kind == "Secret"]
    (variable,) = pod_of(mine)["containers"][0]["env"]
    assert variable["valueFrom"]["secretKeyRef"] == {"name": "mine", "key": "token"}
    monitor = mine["ServiceMonitor", "kvproxy"]["spec"]["endpoints"][0]
    assert monitor["authorization"]["credentials"] == {"name": "mine", "key": "token"}


def test_the_rules_are_the_alerts() -> None:
    """Prometheus' own templates in them are left as they are."""
    rules = render(EVERYTHING)["PrometheusRule", "kvproxy"]["spec"]
    alerts = yaml.safe_load((Path(__file__).parents[2] / "deploy" / "prometheus" / "alerts.yaml").read_text())
    assert rules == alerts


@pytest.mark.parametrize(
    ("config", "granted"),
    [
        ({"discovery": {"kubernetes": {"service": "vllm", "scale": "deployments/vllm"}}}, True),
        ({"clusters": {"chat": {"discovery": {"kubernetes": {"scale": "statefulsets/vllm"}}}}}, True),
        ({"clusters": {"chat": {"discovery": {"kubernetes": {"service": "vllm"}}}}}, False),
        ({"discovery": {"kubernetes": None}, "clusters": {"chat": None}}, False),
    ],
)
def test_workloads_may_be_started_where_a_setting_says_so(config: dict[str, Any], granted: bool) -> None:
    """In the settings of the one cluster or of any of several."""
    rules = render({"config": config})["Role", "models/kvproxy-discovery"]["rules"]
    assert any("deployments/scale" in rule["resources"] for rule in rules) is granted


def test_engines_are_scaled_by_what_is_wanted() -> None:
    """KEDA to and from zero; an autoscaler of Kubernetes' own never to zero, which it cannot."""
    scaled = render(EVERYTHING)["ScaledObject", "kvproxy-engines"]["spec"]
    assert (scaled["minReplicaCount"], scaled["maxReplicaCount"]) == (0, 8)
    (trigger,) = scaled["triggers"]
    query = 'ceil(sum(kvproxy_wanted_endpoints{cluster="default",namespace="models"}))'
    assert trigger["metadata"]["query"] == query
    own = render({"autoscaling": {"kind": "hpa", "minReplicas": 0}})["HorizontalPodAutoscaler", "kvproxy-engines"]
    assert own["spec"]["minReplicas"] == 1
    assert own["spec"]["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": "vllm"}
    assert not [kind for kind, _ in render() if kind in ("ScaledObject", "HorizontalPodAutoscaler")]


def test_routes_to_it() -> None:
    """By the Gateway API or by an Ingress; streams have no time limit."""
    gateway = {"httpRoute": {"enabled": True, "parentRefs": [{"name": "gw"}], "hostnames": ["llm.example"]}}
    (rule,) = render(gateway)["HTTPRoute", "kvproxy"]["spec"]["rules"]
    assert rule["backendRefs"] == [{"name": "kvproxy", "port": 80}]
    assert rule["timeouts"] == {"request": "0s"}
    ingress = render(EVERYTHING)["Ingress", "kvproxy"]["spec"]
    assert ingress["rules"][0]["http"]["paths"][0]["backend"]["service"] == {
        "name": "kvproxy",
        "port": {"name": "http"},
    }
    assert ingress["tls"] == [{"secretName": "llm-tls", "hosts": ["llm.example"]}]


def test_the_pages_show_what_the_chart_makes() -> None:
    """The rights, and the trigger of KEDA; and what they show of Kubernetes fits it."""
    found = render({**EVERYTHING, "config": {"discovery": {"kubernetes": {"scale": "deployments/vllm"}}}})
    loaded = (yaml.safe_load(block.text) for block in blocks("yaml"))
    shown = {one["kind"]: one for one in loaded if "apiVersion" in one}
    assert shown["Role"]["rules"] == found["Role", "models/kvproxy-discovery"]["rules"]
    assert shown["ScaledObject"]["spec"]["triggers"] == found["ScaledObject", "kvproxy-engines"]["spec"]["triggers"]
    assert shown["HTTPRoute"]["spec"]["rules"][0]["timeouts"] == {"request": "0s"}
    for kind in ("Service", "Role", "Ingress"):
        assert validated(kind, shown[kind]) == shown[kind]


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"replica": 3}, "replica"),
        ({"replicas": 0}, "replicas"),
        ({"config": {"listen": "0.0.0.0:1"}}, "config"),
        ({"autoscaling": {"kind": "magic"}}, "kind"),
        ({"httpRoute": {"enabled": True}}, "name the gateway"),
        ({"httpRoute": {"enabled": True, "parentRefs": [{"name": "g"}]}, "ingress": {"enabled": True}}, "choose one"),
    ],
)
def test_values_that_cannot_be_meant_are_refused(values: dict[str, Any], complaint: str) -> None:
    """By the chart's schema, or by itself, with the place."""
    import helm_python

    with pytest.raises(helm_python.HelmError, match=complaint):
        render(values)
