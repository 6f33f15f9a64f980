"""The routing decision as one header line, for a person who asks why a request went where it went."""

from __future__ import annotations

from kvproxy.cluster.pick import Pick
from kvproxy.routing.policy import OverlapFacts

#: A header line stays readable and small whatever the size of the cluster.
_MAX_ENDPOINTS = 8


def describe(pick: Pick, policy: str, facts: OverlapFacts | None) -> str:
    """`policy=...; reason=...; matched=a:512/precise,b:16/approximate; costs=0.120,0.4`, the largest matches first."""
    parts = [f"policy={policy}", f"reason={pick.reason}"]
    if pick.preference is not None:
        parts.append(f"preference={pick.preference}")
    if facts is not None:
        parts.append(f"prompt_tokens={facts.prompt_tokens}")
        held = sorted(facts.by_endpoint.items(), key=lambda item: (-item[1].tokens, item[0]))[:_MAX_ENDPOINTS]
        matched = ",".join(f"{endpoint}:{overlap.tokens}/{overlap.source.value}" for endpoint, overlap in held)
        parts.append(f"matched={matched or 'none'}")
    if pick.costs:
        parts.append("costs=" + ",".join(f"{cost:.4g}" for cost in pick.costs[:_MAX_ENDPOINTS]))
    return "; ".join(parts)
