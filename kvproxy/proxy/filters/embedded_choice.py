"""The proxy's own decision for an app that forwards by itself: by cache and load, reserved until the response ends."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from kvproxy.base.types import Clock, EndpointId
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.pick import AttemptOutcome, Pick
from kvproxy.cluster.routing.policy import PickRequest
from kvproxy.proxy.placement import NO_ENDPOINTS, Placement, make_pick_request
from kvproxy.proxy.request.exchange import Exchange


class _AppPlacement(Placement):
    """Placement of a request that an app carries."""

    excluded: frozenset[EndpointId] = NO_ENDPOINTS

    def make_question(self) -> PickRequest:
        inference = self.exchange.inference
        return make_pick_request(self.exchange, "" if inference is None else inference.model, excluded=self.excluded)


class EmbeddedChoice(msgspec.Struct, eq=False):
    """The place of one request. `exchange` is known once the request's body was read: facts are in it."""

    cluster: Cluster
    clock: Clock
    exchange: Exchange | None = None
    pick: Pick | None = None
    outcome: AttemptOutcome = AttemptOutcome.CANCELLED  # until an answer says otherwise

    async def choose(self, exclude: Iterable[str] = ()) -> str | None:
        """Return the endpoint that this request should go to, and count the request there until its response ends.

        None: no endpoint may take it. A further call moves the request: the endpoint before has failed it.
        """
        self._settle(AttemptOutcome.FAILURE)
        now = self.clock()
        exchange = Exchange(received_at=now) if self.exchange is None else self.exchange
        placement = _AppPlacement(
            exchange=exchange,
            cluster=self.cluster,
            clock=self.clock,
            excluded=frozenset(EndpointId(name) for name in exclude),
        )
        self.pick = await placement.place(now)
        return None if self.pick is None else str(self.pick.endpoint.id)

    def answer(self, status: int) -> None:
        """The app answers with this status."""
        if status >= 500:
            self.outcome = AttemptOutcome.FAILURE
        else:
            self.outcome = AttemptOutcome.CLIENT_ERROR if status >= 400 else AttemptOutcome.SUCCESS

    def first_piece(self) -> None:
        """The first byte of the answer's body goes to the client."""
        if self.pick is not None:
            self.pick.first_token(self.clock())

    def end(self, cached_tokens: int | None) -> None:
        """The response is complete."""
        pick = self.pick
        self._settle(self.outcome)
        if pick is not None and self.outcome is AttemptOutcome.SUCCESS and cached_tokens is not None:
            self.cluster.observe_reuse(pick, cached_tokens, self.clock())

    def release(self) -> None:
        """The app is through with the request; a place that is held still says nothing of its endpoint."""
        self._settle(AttemptOutcome.CANCELLED)

    def _settle(self, outcome: AttemptOutcome) -> None:
        pick = self.pick
        self.pick = None
        if pick is not None:
            pick.settle(outcome, self.clock())
