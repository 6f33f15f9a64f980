"""The balancing policy a client asks for in a header, and whether the cluster lets it."""

from __future__ import annotations

from kvproxy.cluster.cluster import Cluster
from kvproxy.types import Headers

_LONGEST_SHOWN = 64


class NotOffered(Exception):
    """This cluster does not let clients choose that policy; the text is for the client."""


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
