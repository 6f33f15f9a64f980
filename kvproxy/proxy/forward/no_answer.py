"""The proxy's own answer where no engine gave one: which engine failed last, how, and how many are down. Endpoint ids
only: addresses and credentials are no client's business."""

from __future__ import annotations

from kvproxy.base.errors import EndpointUnhealthy, FirstByteTimeout, IdleTimeout, PoolFull, UpstreamError
from kvproxy.base.types import EndpointId
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.endpoint import DOWN
from kvproxy.cluster.screening import Refusal
from kvproxy.proxy.request.error_reply import LocalReply

_HOW = {
    "connect_error": "no connection",
    "connect_timeout": "no connection in time",
    "first_byte_timeout": "no answer in time",
    "idle_timeout": "fell silent",
    "unhealthy": "became unhealthy",
    "upstream_disconnected": "closed the connection",
    "protocol_error": "sent no valid HTTP",
    "pool_full": "every connection is busy",
    "no_file_descriptors": "the proxy has no file descriptor left",
}
_REFUSED = {404: "No engine serves this model.", 503: "No engine can take this request now."}


def reply_of(why: UpstreamError | Refusal, cluster: Cluster, endpoint: EndpointId | None, now: float) -> LocalReply:
    """404 for a model that none serves, 503 for no endpoint or a full one, 504 for an engine too slow, 502 for a broken
    one. `endpoint` is the one that was tried last."""
    status = _status_of(why)
    headers = [(b"retry-after", b"1")] if status == 503 else []
    if isinstance(why, Refusal):
        return LocalReply(status, why.value, _REFUSED[status], headers=headers)
    if endpoint is not None:
        headers.append((b"x-kvproxy-endpoint", endpoint.encode()))
    return LocalReply(status, why.reason, _describe_failure(why, cluster, endpoint, now), headers=headers)


def _status_of(why: UpstreamError | Refusal) -> int:
    if isinstance(why, Refusal):
        return 404 if why is Refusal.MODEL_NOT_SERVED else 503
    if isinstance(why, FirstByteTimeout | IdleTimeout | EndpointUnhealthy):
        return 504
    return 503 if isinstance(why, PoolFull) else 502


def _describe_failure(why: UpstreamError, cluster: Cluster, endpoint: EndpointId | None, now: float) -> str:
    how = _HOW.get(why.reason, why.reason.replace("_", " "))
    if isinstance(why.__cause__, ConnectionRefusedError):
        how = "connection refused"
    conditions = [one.condition(now) for one in cluster.endpoints]
    down = sum(one in DOWN for one in conditions)
    return f"No engine answered: {endpoint or 'none'} {how} ({down} of {len(conditions)} down)."
