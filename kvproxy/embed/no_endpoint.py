"""The refusal of a request that the app carries itself."""

from __future__ import annotations

from collections.abc import Iterable

from kvproxy.base.types import EndpointId
from kvproxy.proxy.request.error_reply import LocalReply


class NoEndpoint(Exception):
    """No endpoint may take a request now.

    `status` is what the proxy would answer: 404 for a model that none serves, 429 where the engines have as much to do
    as they take, 400 for a request that could harm the engines (`shield: refuse`), else 503. `reason` is from the
    closed set of error codes; `retry_after_s` is None where trying again is of no use.
    """

    def __init__(self, reply: LocalReply) -> None:
        super().__init__(str(reply))
        self.status = reply.status
        self.reason = reply.reason
        seconds = dict(reply.headers).get(b"retry-after")
        self.retry_after_s = None if seconds is None else float(seconds)


def endpoint_ids(names: Iterable[str]) -> frozenset[EndpointId]:
    """Return them as a set; one id alone is that id, not its letters."""
    return frozenset(EndpointId(name) for name in ((names,) if isinstance(names, str) else names))
