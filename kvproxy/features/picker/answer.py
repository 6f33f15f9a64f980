"""The answer to a request that another program carries: where it came from, when, what it counts, how it ended."""

from __future__ import annotations

from kvproxy.base.errors import UpstreamError
from kvproxy.base.types import Headers
from kvproxy.cluster.pick import AttemptOutcome
from kvproxy.features.picker.carried import CarriedRequest
from kvproxy.proxy.external import address_of
from kvproxy.proxy.forward.answer import verdict_on
from kvproxy.proxy.forward.relay import LAST_PIECES, TAIL_BYTES, read_end
from kvproxy.proxy.request.observer import RequestObserver, notify
from kvproxy.proxy.reservations import PickReservation


class CarriedAnswer:
    """Begins with the answer's head; `completed` ends its request."""

    def __init__(self, request: CarriedRequest, status: int, headers: Headers) -> None:
        self._request = request
        self._headers = headers
        self._outcome = request.exchange.outcome
        self._outcome.status = status
        self._first = b""
        self._last: list[bytes] = []

    def locate(self, address: str, details: str) -> str:
        """It came from `address` ("": not told), or the carrier answered itself (`details` show why). The load follows.
        How that stands to the pick; a metric label."""
        request = self._request
        held = self._request.held
        if not details and held is not None:
            return self._follow(held, address) if address else "unreported"
        self._outcome.end = "local_reply"
        unreached = details.startswith("upstream")
        request.settle(AttemptOutcome.FAILURE if unreached else AttemptOutcome.CANCELLED)
        return "none"

    def _follow(self, held: PickReservation, address: str) -> str:
        if address == address_of(held.pick.endpoint):
            return "as_picked"
        request = self._request
        cluster = held.cluster
        fallback = next((each for each in request.listed if address_of(each) == address), None)
        served = fallback or next((each for each in cluster.endpoints if address_of(each) == address), None)
        # Why it went elsewhere is not said: the first could not be reached, or the carrier does not know it.
        request.settle(AttemptOutcome.CANCELLED if fallback is None else AttemptOutcome.UNPROVEN)
        if served is None:
            return "unknown"
        now = request.placer.clock()
        request.move_to(served, now)
        self._outcome.endpoint = served.id
        return "elsewhere" if fallback is None else "fallback"

    def piece(self, data: bytes) -> None:
        """A piece of its body went by."""
        if not data:
            return
        if not self._first:
            self._first = data
            if self._request.is_streamed:
                self._first_byte(self._request.placer.clock())
        self._last.append(data)
        if len(self._last) > LAST_PIECES:
            del self._last[0]

    def completed(self) -> None:
        """It is whole."""
        request = self._request
        outcome = self._outcome
        outcome.end = outcome.end or "completed"
        error = self._read_end() if self._last else None
        held = request.held
        now = request.placer.clock()
        if held is not None:
            if outcome.ttft_s is None and outcome.status < 400:
                self._first_byte(now)
            verdict = self._verdict(held, error, now)
            held.pick.endpoint.metrics.count_request(outcome.status)
            request.settle(verdict, prompt_tokens=outcome.prompt_tokens, cached_tokens=outcome.cached_tokens)
            if verdict is AttemptOutcome.SUCCESS and outcome.completion_tokens is not None:
                policies = held.cluster.policies
                endpoint = held.pick.endpoint.id
                policies.observe_answer(endpoint, held.pick.reservation, outcome.completion_tokens, now)
        request.finish(now)

    def _first_byte(self, now: float) -> None:
        request = self._request
        exchange = self._request.exchange
        if request.held is not None:
            request.placer.held.first_token(request.held.id)
        exchange.outcome.ttft_s = now - exchange.received_at
        if "first_byte" in exchange.hooks:
            notify(RequestObserver.first_byte, exchange, now)

    def _read_end(self) -> UpstreamError | None:
        *earlier, last = self._last
        tail = b"".join(earlier)[-TAIL_BYTES:] + last
        request = self._request
        return read_end(
            request.exchange, self._outcome.status, self._headers, first=self._first, tail=tail, post=request.post
        )

    def _verdict(self, held: PickReservation, error: UpstreamError | None, now: float) -> AttemptOutcome:
        status = self._outcome.status
        endpoint = held.pick.endpoint
        if error is None and status < 400:
            return AttemptOutcome.SUCCESS
        if status == 503:
            return AttemptOutcome.BUSY
        verdict = verdict_on(status, error)
        if verdict is AttemptOutcome.FAILURE:
            reason = f"status_{status}" if error is None else error.reason
            endpoint.metrics.attempt_failure(reason)
            client = self._request.exchange.tenant
            if held.cluster.verdicts.is_spared(
                endpoint, held.pick.decision.request.model, reason=reason, client=client, now=now
            ):
                return AttemptOutcome.UNPROVEN
        return verdict
