"""`kvproxy drain`, `undrain` and `reload`: changes to a running proxy through its admin listener."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TextIO
from urllib.parse import quote

import httpx

from kvproxy.commands.admin_client import AdminAddress, AdminRefused, ask
from kvproxy.config.fields import spelling_hint


def drain(
    address: AdminAddress,
    endpoint: str,
    *,
    cluster: str | None = None,
    draining: bool = True,
    out: TextIO,
    err: TextIO,
    transport: httpx.BaseTransport | None = None,
) -> int:
    """Take an endpoint out of, or back into, rotation; 1 when that was not done."""
    action = "drain" if draining else "undrain"
    with address.client(transport=transport) as client:
        try:
            place = _cluster_of(ask(client, address.url, "/endpoints"), endpoint, cluster)
            path = f"/endpoints/{quote(place, safe='')}/{quote(endpoint, safe='/:@')}/{action}"
            status = ask(client, address.url, path, method="POST")
        except AdminRefused as error:
            print(f"kvproxy {action}: {error}", file=err)
            return 1
    running = status.get("in_flight", 0)
    said = f"gets no new requests; {running} in flight" if draining else "gets requests again"
    print(f"endpoint {endpoint!r} of cluster {place!r} {said}", file=out)
    return 0


def reload(address: AdminAddress, *, out: TextIO, err: TextIO, transport: httpx.BaseTransport | None = None) -> int:
    """Have the configuration file read anew; 1, and every problem, when it was not applied."""
    with address.client(transport=transport) as client:
        try:
            answer = ask(client, address.url, "/reload", method="POST")
        except AdminRefused as error:
            print(f"kvproxy reload: not reloaded, the old configuration stays\n{error}", file=err)
            return 1
    print("configuration reloaded", file=out)
    if answer.get("after_restart"):
        print(f"after a restart: {', '.join(answer['after_restart'])}", file=out)
    return 0


def _cluster_of(answer: dict[str, Any], endpoint: str, cluster: str | None) -> str:
    """The cluster that has the endpoint. Raises AdminRefused when none has, or several have."""
    clusters: dict[str, Sequence[dict[str, Any]]] = answer.get("clusters", {})
    if cluster is not None:
        if cluster not in clusters:
            raise AdminRefused(f"there is no cluster {cluster!r} ({spelling_hint(cluster, clusters)})")
        clusters = {cluster: clusters[cluster]}
    holding = [name for name, endpoints in clusters.items() if any(one.get("id") == endpoint for one in endpoints)]
    if len(holding) > 1:
        raise AdminRefused(f"clusters {', '.join(holding)} have an endpoint {endpoint!r}: name one (--cluster)")
    if not holding:
        known = [str(one.get("id")) for endpoints in clusters.values() for one in endpoints]
        raise AdminRefused(
            f"there is no endpoint {endpoint!r} ({spelling_hint(endpoint, known) or 'none is configured'})"
        )
    return holding[0]
