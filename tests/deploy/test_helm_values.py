"""The Helm chart's parts that need no Helm: values, schema, versions; tests/packaging renders it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from kvproxy import __version__
from kvproxy.base.settings.compose import part_of
from kvproxy.features.kubernetes.settings import KubernetesPlace
from kvproxy.operate.config.load import load_config

DEPLOY = Path(__file__).parents[2] / "deploy"
CHART = DEPLOY / "helm" / "kvproxy"
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())


def test_the_version_is_kvproxys() -> None:
    """Of the chart, and of the image it starts."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (__version__, __version__)


def test_the_schema_knows_every_value() -> None:
    """And none that is not there: a typing error is refused and not ignored."""
    schema = json.loads((CHART / "values.schema.json").read_text())

    def compare(part: dict[str, Any], values: dict[str, Any], path: str) -> None:
        assert part["additionalProperties"] is False, path
        assert part["properties"].keys() - {"global"} == values.keys(), path
        for key, value in values.items():
            if part["properties"][key].get("properties") and isinstance(value, dict):
                inner = part["properties"][key]
                compare({"additionalProperties": False, **inner}, value, f"{path}.{key}")

    compare(schema, VALUES, "values")


def test_the_default_configuration_is_a_good_one() -> None:
    """As it stands in the values; the templates add the listeners and the drain."""
    config = load_config(yaml.safe_dump(VALUES["config"]))
    kubernetes = part_of(config.clusters["default"].discovery, KubernetesPlace).kubernetes
    assert kubernetes is not None
    assert kubernetes.service == VALUES["autoscaling"]["target"]["name"]


def test_the_alerts_are_those_of_prometheus() -> None:
    """The chart has to carry its files in its own folder."""
    assert (CHART / "files" / "alerts.yaml").read_bytes() == (DEPLOY / "prometheus" / "alerts.yaml").read_bytes()
