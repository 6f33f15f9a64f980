"""The Kubernetes manifests fit Kubernetes' own API: fields exist and have their types, none that is required lacks."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from tests.deploy.test_kubernetes import manifests

pytestmark = pytest.mark.packaging


def validated(kind: str, value: dict[str, Any]) -> Any:
    """Return the value as read by the API's own model of its version. Raises ValidationError."""
    from kubernetes.client import models  # only the packaging environment has it

    version = value.get("apiVersion", "v1").rpartition("/")[2]
    return (
        getattr(models, f"{version.upper()}{kind}").model_validate(value).model_dump(by_alias=True, exclude_none=True)
    )


@pytest.mark.parametrize(
    "manifest",
    [m for m in manifests() if m["kind"] != "ServiceMonitor"],  # not Kubernetes' own
    ids=lambda m: f"{m['kind']}/{m['metadata']['name']}",
)
def test_it_fits_the_api(manifest: dict[str, Any]) -> None:
    """Names, types and required fields, at every depth."""
    assert validated(manifest["kind"], manifest) == manifest


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("Deployment", {"spec": {"template": {}}}),
        ("ServiceSpec", {"port": 1}),
        ("Container", {"name": "x", "ports": {"http": 1}}),
        ("PodSecurityContext", {"runAsNonRoot": "true"}),
    ],
)
def test_bodies_that_do_not_fit_are_refused(kind: str, value: dict[str, Any]) -> None:
    """The check itself can fail: lacking, unknown, of another shape, of another type."""
    with pytest.raises(ValidationError):
        validated(kind, value)
