"""The feature, as the core meets it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvproxy.cluster.settings import PolicyName
from kvproxy.operate.feature import Feature

if TYPE_CHECKING:
    from kvproxy.cluster.routing.policy import Policy


class HashPolicies(Feature):
    """Adds policies that hash a key of the request: the session's, or the prompt's head."""

    name = "hash_policies"

    def policy_types(self) -> Mapping[PolicyName, type[Policy]]:
        """Return both of them."""
        from kvproxy.features.hash_policies.consistent_hash import ConsistentHash
        from kvproxy.features.hash_policies.session import Session

        return {PolicyName.CONSISTENT_HASH: ConsistentHash, PolicyName.SESSION: Session}


FEATURE = HashPolicies()
