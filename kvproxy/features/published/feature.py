"""The feature, as the core meets it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvproxy.cluster.settings import PolicyName
from kvproxy.operate.feature import Feature

if TYPE_CHECKING:
    from kvproxy.cluster.routing.policy import Policy


class Published(Feature):
    """Adds policies of other schedulers."""

    name = "published"

    def policy_types(self) -> Mapping[PolicyName, type[Policy]]:
        """Return all of them."""
        from kvproxy.features.published.policies import (
            Dynamo,
            DynamoAgentic,
            LeastTtft,
            LlmD,
            LlmDSticky,
            LMetric,
            PrefixAffinity,
        )

        return {
            PolicyName.DYNAMO: Dynamo,
            PolicyName.DYNAMO_AGENTIC: DynamoAgentic,
            PolicyName.LLM_D: LlmD,
            PolicyName.LLM_D_STICKY: LlmDSticky,
            PolicyName.LMETRIC: LMetric,
            PolicyName.LEAST_TTFT: LeastTtft,
            PolicyName.PREFIX_AFFINITY: PrefixAffinity,
        }


FEATURE = Published()
