"""The health probe that every engine understands: GET on its health path."""

from __future__ import annotations

from kvproxy.cluster.endpoint import Endpoint
from kvproxy.config.cluster_schema import HealthCheckSettings
from kvproxy.types import Headers
from kvproxy.upstream.pool import Timeouts, UpstreamPool


class HttpProbe:
    """Any 2xx is well. Carries the endpoint's own credential, for gateways that ask for it.

    `pool` is best one of its own that keeps no connections: where requests fill every connection a probe would wait for
    one, and a busy endpoint would look dead; and a kept connection does not show that new ones are still accepted.
    """

    def __init__(self, pool: UpstreamPool, settings: HealthCheckSettings) -> None:
        self._pool = pool
        self._target = settings.path.encode("utf-8")
        self._timeouts = Timeouts(settings.timeout, settings.timeout, settings.timeout)

    async def __call__(self, endpoint: Endpoint) -> bool:
        headers: Headers = [(b"user-agent", b"kvproxy-health")]
        if endpoint.authorization:
            headers.append((b"authorization", endpoint.authorization))
        response = await self._pool.request(
            endpoint.origin, b"GET", self._target, headers, None, timeouts=self._timeouts
        )
        response.abort()  # the status says it all
        return 200 <= response.status < 300
