"""One prefill of a request at an endpoint that does not answer it."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

import msgspec

from kvproxy.base.background_task import TaskSet, cancel_tasks
from kvproxy.base.errors import PoolFull, UpstreamError
from kvproxy.base.types import Clock
from kvproxy.base.upstream.response import UpstreamResponse
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.cluster.pick import AttemptOutcome, Pick, reserve
from kvproxy.cluster.routing.selector import PREFERRED, Decision
from kvproxy.features.disaggregation.bodies import Names, encode, shorten
from kvproxy.features.disaggregation.connectors.base import KvConnector, LegTerms, NoHandle
from kvproxy.features.disaggregation.handle import Handle, HandleRefused
from kvproxy.features.disaggregation.metrics import DisaggregationMetrics
from kvproxy.features.disaggregation.note import Legs
from kvproxy.features.disaggregation.pairs import Pairs
from kvproxy.features.disaggregation.settings import DisaggregationSettings
from kvproxy.proxy.forward.engine_request import Answer, EngineRequest

#: Longest answer to a prefill; the block ids of a million tokens are shorter.
MAX_ANSWER_BYTES = 4 << 20
#: Time for which the decode leg of a client that left goes on, so that its engine has it.
FREEING_S = 0.25


@dataclass(frozen=True, slots=True)
class Splitting:
    """Resources shared by all requests of a cluster that go in legs."""

    cluster: Cluster
    connector: KvConnector
    settings: DisaggregationSettings
    pairs: Pairs
    metrics: DisaggregationMetrics
    tasks: TaskSet
    clock: Clock


class PrefillLeg:
    """Reserved when it is made, at an endpoint that computes the prompt for `decode`; settled once it was asked."""

    def __init__(self, shared: Splitting, endpoint: Endpoint, decode: Pick, *, names: Names, legs: Legs) -> None:
        self.endpoint = endpoint
        self.done = False  # the endpoint has the prompt
        self._shared = shared
        self._decode = decode
        self._names = names
        self._legs = legs
        now = shared.clock()
        made = decode.decision
        asked = msgspec.structs.replace(made.request, streams=True)  # the end of its answer is its first token
        decision = Decision(asked, (endpoint,), 0, endpoint, PREFERRED, made.policy, made.decided_by)
        reservation = reserve(endpoint, asked, shared.cluster.speeds, now)
        self._pick = Pick(decision, endpoint, reservation, endpoint.breaker.admit(), shared.cluster)
        if endpoint.saturated:
            shared.cluster.screening.invalidate(endpoint)
        legs.prefill = endpoint.id
        legs.prefills += 1

    async def ask(self, request: EngineRequest, terms: LegTerms) -> tuple[bytes | None, str]:
        """Return the engine's answer, if it is good, and the result."""
        shared = self._shared
        pick = self._pick
        began = shared.clock()
        result = "timeout"
        outcome = AttemptOutcome.FAILURE
        answer = None
        try:
            async with asyncio.timeout(shared.settings.prefill_timeout) as limit:
                now = asyncio.get_running_loop().time
                pick.on_unhealthy(lambda: None if limit.expired() else limit.reschedule(now()))
                status, answer = await self._send(request, terms)
            result, outcome = _judge(status)
        except TimeoutError:
            if not pick.endpoint.health.is_healthy:  # found by its probes, which have judged it
                result = "unhealthy"
                outcome = AttemptOutcome.CANCELLED
        except UpstreamError as error:
            result = error.reason
            if isinstance(error, PoolFull):
                outcome = AttemptOutcome.BUSY
        now_s = shared.clock()
        if outcome is AttemptOutcome.SUCCESS:
            pick.first_token(now_s)
            self.done = True
            self._legs.prefill_s = now_s - began
            shared.metrics.seconds.labels(shared.cluster.name).observe(now_s - began)
        pick.settle(outcome, now_s)
        return (answer if outcome is AttemptOutcome.SUCCESS else None), result

    async def _send(self, request: EngineRequest, terms: LegTerms) -> tuple[int, bytes]:
        endpoint = self.endpoint
        names = self._names
        inference = request.exchange.inference
        assert inference is not None
        if self._shared.connector.shortens:
            names = shorten(names, inference.kind)
        head = request.head_for(endpoint)
        if endpoint.rank is not None:
            head = head.with_rank(endpoint.engine.ranks.number(endpoint.rank))
        response = await request.pool.request(
            endpoint.origin,
            request.method,
            request.target,
            head.own,
            encode({**names, **terms.prefill}),
            timeouts=request.timeouts,
            repeated=head.repeated,
        )
        reading = asyncio.ensure_future(_read_answer(response))
        try:
            return response.status, await asyncio.shield(reading)
        except asyncio.CancelledError:
            await self._free(request, reading)
            raise
        finally:
            response.abort()
            await cancel_tasks([reading])

    async def _free(self, request: EngineRequest, reading: asyncio.Task[bytes]) -> None:
        """Free the blocks that a prefill's answer names, which was under way as the client left."""
        await asyncio.wait([reading], timeout=FREEING_S)
        if not reading.done() or reading.exception() is not None:
            return
        with contextlib.suppress(NoHandle, HandleRefused):
            handle = self.make_handle(request, self._shared.connector.read_member(reading.result(), self.endpoint))
            if member := take_member(handle, request, self._shared.clock()):
                await let_go(pull(request, self._decode, member), FREEING_S)

    def make_handle(self, request: EngineRequest, member: bytes) -> Handle:
        """Return the right to pull the prompt by this member of the decoder's body."""
        body = request.body.whole
        assert body is not None
        return Handle(member, body, lease_s=self._shared.settings.lease, now=self._shared.clock())

    def count(self, result: str) -> None:
        """Count its result."""
        name = self._shared.cluster.name
        self._shared.metrics.prefills.labels(name, str(self.endpoint.id), result).inc()

    def settle(self) -> None:
        """Give back the reservation if the client left before the answer."""
        self._pick.settle(AttemptOutcome.CANCELLED, self._shared.clock())


def take_member(handle: Handle, request: EngineRequest, now: float) -> bytes:
    """Return what the decoder pulls by. Raises HandleRefused."""
    body = request.body.whole
    assert body is not None
    return handle.take(body, now)


def pull(request: EngineRequest, pick: Pick, member: bytes) -> asyncio.Task[Answer]:
    """Send the decode leg, which is sent once: a decoder that took the member may not get it again."""
    return asyncio.ensure_future(msgspec.structs.replace(request, once=True).ask_whole(pick, member))


def _judge(status: int) -> tuple[str, AttemptOutcome]:
    """Return the result of a prefill with this status, and what it means for the endpoint."""
    if status == 503:
        return "busy", AttemptOutcome.BUSY
    if status >= 500:
        return "status_5xx", AttemptOutcome.FAILURE
    if status >= 400:
        return "status_4xx", AttemptOutcome.CLIENT_ERROR
    return "done", AttemptOutcome.SUCCESS


async def _read_answer(response: UpstreamResponse) -> bytes:
    answer = b""
    while not response.complete and len(answer) <= MAX_ANSWER_BYTES:
        answer += await response.next_chunk()
    return answer + (response.take() or b"")


async def let_go(sent: asyncio.Task[Answer], left_s: float) -> None:
    """End the decode leg of a client that left, once its engine has it: the engine then frees the prefiller's blocks,
    too."""
    try:
        if left_s > 0:
            await asyncio.wait([sent], timeout=left_s)
    finally:
        if sent.done() and not sent.cancelled() and sent.exception() is None:
            sent.result()[0].abort()
        sent.cancel()
    await cancel_tasks([sent])
