"""What a client may ask for by header: a policy, a priority in the queue, and to see the decision."""

from __future__ import annotations

from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.pick import Pick
from kvproxy.request.error_reply import LocalReply
from kvproxy.routing.policy import OverlapFacts
from kvproxy.types import Headers

_LONGEST_SHOWN = 64
#: The largest priority, and the negative of the least.
MAX_PRIORITY = 100
#: A header line stays readable and small whatever the size of the cluster.
_MAX_ENDPOINTS = 8


class NotOffered(LocalReply):
    """This cluster does not let clients choose that policy; the text is for the client."""

    def __init__(self, message: str) -> None:
        super().__init__(400, "policy_not_offered", message)


def chosen_policy(headers: Headers, name: bytes, cluster: Cluster) -> str:
    """The policy that header `name` asks for; "" without the header. NotOffered."""
    asked = next((value for header, value in headers if header == name), b"").decode("latin-1").strip()
    if not asked:
        return ""
    named = cluster.policies.named
    if not named:
        raise NotOffered(f"The policy `{asked[:_LONGEST_SHOWN]}` was asked for, and clients cannot choose one here.")
    if asked not in named:
        offered = ", ".join(named)
        raise NotOffered(f"The policy `{asked[:_LONGEST_SHOWN]}` is not on offer here; these are: {offered}.")
    return asked


def priority_of(headers: Headers, name: bytes) -> int:
    """The integer in header `name`, from -100 to 100; 0 when there is none."""
    value = next((value for header, value in headers if header == name), b"0")
    try:
        return max(-MAX_PRIORITY, min(MAX_PRIORITY, int(value)))
    except ValueError:
        return 0


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
