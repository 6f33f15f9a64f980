"""The member `priority` of a forwarded body: written in front of the others, without touching or copying these."""

from __future__ import annotations

from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.pick import Pick
from kvproxy.config.cluster_schema import PriorityOrder
from kvproxy.forward.request_options import MAX_PRIORITY
from kvproxy.request.exchange import Exchange
from kvproxy.routing.policy import NO_FACTS
from kvproxy.types import RequestKind

#: Statuses of engines that take no `priority`: vLLM where it is not enabled, schemas that know no such field, SGLang
#: with `--abort-on-priority-when-disabled`.
REFUSING = frozenset({400, 422, 503})

_ORDERED = frozenset({RequestKind.CHAT, RequestKind.COMPLETION, RequestKind.MESSAGES, RequestKind.RESPONSES})
_MEMBER = b'"priority":%d,'


def names_priority(error: bytes) -> bool:
    """Whether an engine's error may be about the field."""
    return b"priority" in error.lower()


def with_priority(body: bytes, exchange: Exchange, cluster: Cluster, pick: Pick, *, level: int) -> tuple[bytes, int]:
    """The beginning of the body, its brace and the member, and how much of `body` that stands for; (b"", 0) where the
    request carries none.

    The body is a JSON object without such a member of its own: what was parsed as a request has at least one member,
    and the guard has cut a client's own.
    """
    exchange.outcome.engine_priority = None  # an earlier attempt's
    inference, endpoint, now = exchange.inference, pick.endpoint, cluster.priority.clock()
    if inference is None or inference.kind not in _ORDERED or not (inference.model or inference.prompt.parts):
        return b"", 0
    if not endpoint.priority.sends(now):
        return b"", 0
    if own := exchange.own_priority:
        own = own if endpoint.priority.order is PriorityOrder.HIGHEST_FIRST else -own
        level += max(-MAX_PRIORITY, min(MAX_PRIORITY, own))
    urgency = cluster.priority.urgency_s(
        exchange.facts or NO_FACTS,
        endpoint.id,
        received_at=exchange.received_at,
        now=now,
        level=level,
        tenant=exchange.tenant,
        endpoints=len(cluster.endpoints),
    )
    number = endpoint.priority.number(urgency, pick, now, hidden=pick.reservation.hidden)
    exchange.outcome.engine_priority = number
    endpoint.metrics.engine_priority("sent")
    at = body.index(b"{") + 1
    return body[:at] + _MEMBER % number, at
