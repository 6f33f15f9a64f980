"""The feature is there, or it is not."""

from __future__ import annotations

import pytest

from kvproxy.base.errors import ConfigError
from kvproxy.cluster.routing import registry
from kvproxy.cluster.settings import OPTIONAL_POLICIES
from kvproxy.features.published.feature import FEATURE
from kvproxy.operate.config.load import load_config

NAMED = {"endpoints": {"a": "http://127.0.0.1:1"}, "policy": "llm_d", "client_policies": ["random", "dynamo"]}


def test_the_core_leaves_its_policies_to_features() -> None:
    """A configuration that names one without the feature is refused."""
    assert FEATURE.policy_types().keys() <= OPTIONAL_POLICIES


def test_without_it_its_policies_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each where it is named."""
    monkeypatch.setattr(registry, "policy_types", lambda: registry.POLICIES)
    with pytest.raises(ConfigError) as refused:
        load_config(NAMED)
    assert [(one.path, one.message) for one in refused.value.problems] == [
        ("policy", "no installed feature has the policy llm_d"),
        ("client_policies[1]", "no installed feature has the policy dynamo"),
    ]
