"""Policies by name."""

from __future__ import annotations

import random

import pytest

from kvproxy.cluster.routing.policy import PickRequest
from kvproxy.cluster.routing.registry import make_policy, policy_types
from kvproxy.cluster.settings import OPTIONAL_POLICIES, PolicyName
from tests.cluster.routing.fleet import fleet


@pytest.mark.parametrize("name", list(policy_types()))
def test_every_registered_policy_chooses_among_its_candidates(name: PolicyName) -> None:
    """Whatever the request says, and with one candidate as with many."""
    policy = make_policy(name, rng=random.Random(1))
    for count in (1, 2, 5):
        for request in (PickRequest(), PickRequest(session_key="s"), PickRequest(prompt_head=b"head")):
            choice = policy.choose(request, fleet(count), 0.0)
            assert 0 <= choice.index < count
            assert choice.reason


def test_every_policy_of_the_configuration_is_registered() -> None:
    """A name that the checker accepts must not fail at start; some are left to a feature."""
    assert set(PolicyName) - OPTIONAL_POLICIES <= set(policy_types()) <= set(PolicyName)
