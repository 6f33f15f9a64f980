"""Endpoints that have left their cluster and finish the requests they have."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvproxy.base.types import EndpointId
from kvproxy.base.upstream.origin import Origin
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.cluster.engine import Engine

log = logging.getLogger(__name__)


class Departures:
    """The endpoints that leave one cluster. `on_gone` is called when one loses its series: with its last request, or
    when another endpoint takes its id."""

    def __init__(self, *, on_gone: Callable[[Endpoint], None]) -> None:
        #: Those with requests in flight.
        self.endpoints: list[Endpoint] = []
        self._on_gone = on_gone

    def begin(self, endpoint: Endpoint, *, replaced: bool) -> None:
        """Take an endpoint that leaves, `replaced` by another one of its id or not."""
        log.info("endpoint %s at %s leaves, %d in flight", endpoint.id, endpoint.origin, endpoint.load.own_in_flight)
        endpoint.removed = True
        if replaced or endpoint.load.own_in_flight == 0:
            self._close_series(endpoint)
        if endpoint.load.own_in_flight:
            self.endpoints.append(endpoint)

    def find_engine(self, name: str, origin: Origin) -> Engine | None:
        """Return the engine of this name at this address, of endpoints that may come back."""
        for one in self.endpoints:
            if one.engine.id == name and one.engine.origin == origin and not one.metrics.closed:
                return one.engine
        return None

    def take_back(self, endpoint_id: EndpointId, engine: Engine) -> Endpoint | None:
        """Return the endpoint of this id if it left and comes back. At another address it gives up its series."""
        for endpoint in [one for one in self.endpoints if one.id == endpoint_id]:
            if endpoint.engine is engine and not endpoint.metrics.closed:
                self.endpoints.remove(endpoint)
                endpoint.removed = False
                return endpoint
            self._close_series(endpoint)
        return None

    def on_release(self, endpoint: Endpoint) -> None:
        """Drop an endpoint after its last request."""
        if endpoint.load.own_in_flight == 0 and endpoint in self.endpoints:
            self.endpoints.remove(endpoint)
            self._close_series(endpoint)

    def _close_series(self, endpoint: Endpoint) -> None:
        if not endpoint.metrics.closed:
            endpoint.metrics.close()
            self._on_gone(endpoint)
