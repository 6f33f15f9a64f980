"""One request in two legs: the prefill at one endpoint; then, or beside it, the answer at another.

Every failure before the first byte ends at the decoder, which computes the prompt itself, or in an error that the
forwarder knows how to retry. Nothing but the decode leg frees the blocks that a prefiller holds, so it is sent, and
then aborted, for a client that left meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

import msgspec

from kvproxy.base.background_task import TaskSet, cancel_tasks
from kvproxy.base.errors import FirstByteTimeout, PoolFull, UpstreamError
from kvproxy.base.types import Clock
from kvproxy.base.upstream.response import UpstreamResponse
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.cluster.pick import AttemptOutcome, Pick, reserve
from kvproxy.cluster.routing.selector import PREFERRED, Decision
from kvproxy.cluster.routing.work import PromptSplit
from kvproxy.features.disaggregation.bodies import Names, encode, shorten
from kvproxy.features.disaggregation.connectors.base import KvConnector, LegTerms, NoHandle
from kvproxy.features.disaggregation.handle import Handle, HandleRefused
from kvproxy.features.disaggregation.metrics import DisaggregationMetrics
from kvproxy.features.disaggregation.note import ERROR, FAILED, LOCAL, PULLED, REFUSED, Legs
from kvproxy.features.disaggregation.pairs import Pairs
from kvproxy.features.disaggregation.plan import Plan, split_of_pulled
from kvproxy.features.disaggregation.settings import DisaggregationSettings
from kvproxy.proxy.forward.answer import read_short
from kvproxy.proxy.forward.engine_request import Answer, EngineRequest

#: Endpoints that are asked to prefill one prompt, at most.
MAX_PREFILLS = 2
#: Longest answer to a prefill; the block ids of a million tokens are shorter.
MAX_ANSWER_BYTES = 4 << 20
#: Time for which the decode leg of a client that left goes on, so that its engine has it.
FREEING_S = 0.25
#: In the error of an engine that is dead, whatever the request.
_DEAD = b"EngineCore"
_NOT_ABOUT_KV = frozenset({501, 503})


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


class NoPrefill(PoolFull):
    """No endpoint has prefilled the prompt, and the decoder cannot compute it itself."""

    reason = "no_prefill"


class TwoLegs:
    """Made in the turn of the decision, in which its first prefill is reserved; `run` is awaited in place of the plain
    request."""

    def __init__(
        self,
        shared: Splitting,
        request: EngineRequest,
        pick: Pick,
        *,
        names: Names,
        legs: Legs,
        others: list[Plan[Endpoint]],
    ) -> None:
        """`others` prefill if the first endpoint fails, the cheapest first."""
        self._shared = shared
        self._request = request
        self._plain = request  # without what the decode leg adds to the head
        self._pick = pick
        self._names = names
        self._legs = legs
        self._others = others
        own = pick.reservation
        self._local = PromptSplit(own.uncached_tokens, own.cached_tokens, own.lower, own.features[3])
        self._prefill: Pick | None = None
        self._pull_s = 0.0
        self._beside: asyncio.Task[None] | None = None  # the prefill leg of a connector that needs both at once
        self._sent: asyncio.Task[Answer] | None = None  # the decode leg
        self._prefilled = False  # by the endpoint of the latest prefill
        self._elsewhere = False  # after the failure of a prefill beside it another endpoint may prefill

    def reserve(self, plan: Plan[Endpoint]) -> None:
        """Count the prefill in at its endpoint, and out at the decoder."""
        endpoint = plan.prefill
        now = self._shared.clock()
        made = self._pick.decision
        cluster = self._shared.cluster
        asked = msgspec.structs.replace(made.request, streams=True)  # the end of its answer is its first token
        decision = Decision(asked, (endpoint,), 0, endpoint, PREFERRED, made.policy, made.decided_by)
        reservation = reserve(endpoint, asked, cluster.speeds, now)
        self._prefill = Pick(decision, endpoint, reservation, endpoint.breaker.admit(), cluster)
        if endpoint.saturated:
            cluster.screening.invalidate(endpoint)
        self._legs.prefill = endpoint.id
        self._legs.prefills += 1
        self._pull_s = plan.pull_s
        self._count_as_pulled()
        self._note_prompt_at(endpoint)

    async def run(self) -> Answer:
        """Return the decoder's answer. Raises UpstreamError's kinds."""
        connector = self._shared.connector
        result = "left"
        try:
            handle: Handle | None
            if connector.sends_prefill and not connector.at_once:
                handle = await self._prefill_first()
            else:
                handle = self._prefill_beside()
            answer = await (self._compute_here(LOCAL) if handle is None else self._pull(handle))
            result = self._legs.result
            return answer
        except UpstreamError:
            result = self._legs.result = FAILED
            raise
        finally:
            if result == "left" and self._beside is not None:
                self._beside.cancel()
            self._settle(AttemptOutcome.CANCELLED)
            self._shared.metrics.requests.labels(self._shared.cluster.name, result).inc()

    async def _prefill_first(self) -> Handle | None:
        """Return what the decoder pulls by; None: no endpoint has prefilled the prompt."""
        while (pick := self._prefill) is not None:
            terms = self._shared.connector.begin(pick.endpoint)
            answer, result = await self._ask_prefill(pick, terms)
            handle = None
            if answer is not None:
                try:
                    handle = self._make_handle(self._shared.connector.read_member(answer, pick.endpoint))
                except NoHandle:
                    result = "no_handle"
            self._count_prefill(pick, result)
            if handle is not None:
                return handle
            self._prefill = None
            if result in _ELSEWHERE:
                self._reserve_another()
        return None

    def _reserve_another(self) -> bool:
        """Have the next endpoint prefill, if there is one and few have tried."""
        if not self._others or self._legs.prefills >= MAX_PREFILLS:
            return False
        self.reserve(self._others.pop(0))
        return True

    def _prefill_beside(self) -> Handle | None:
        """Start the prefill leg, unless the decoder's side sends it; the decode leg need not wait for it."""
        pick = self._prefill
        assert pick is not None
        try:
            terms = self._shared.connector.begin(pick.endpoint)
        except NoHandle:
            return None
        if terms.fields:
            head = self._request.head
            fields = msgspec.structs.replace(head, own=[*head.own, *terms.fields])
            self._request = msgspec.structs.replace(self._request, head=fields)
        if self._shared.connector.sends_prefill:
            self._prefill = None  # it is the task's from now on
            self._beside = self._shared.tasks.start(self._follow_prefill(pick, terms), name="prefill leg")
        return self._make_handle(terms.decode)

    async def _follow_prefill(self, pick: Pick, terms: LegTerms) -> None:
        """Read the prefill's answer to its end, after the decoder's too; its failure ends the decode leg."""
        result = "left"
        try:
            _, result = await self._ask_prefill(pick, terms)
        finally:
            self._count_prefill(pick, result)
            pick.settle(AttemptOutcome.CANCELLED, self._shared.clock())
        if result != "done" and self._sent is not None:
            self._elsewhere = result in _ELSEWHERE
            self._sent.cancel()

    def _make_handle(self, member: bytes) -> Handle:
        body = self._request.body.whole
        assert body is not None
        return Handle(member, body, lease_s=self._shared.settings.lease, now=self._shared.clock())

    async def _ask_prefill(self, pick: Pick, terms: LegTerms) -> tuple[bytes | None, str]:
        """Return the engine's answer, if it is good, and the result. The pick is settled unless the client leaves."""
        shared = self._shared
        began = shared.clock()
        result = "timeout"
        outcome = AttemptOutcome.FAILURE
        answer = None
        try:
            async with asyncio.timeout(shared.settings.prefill_timeout) as limit:
                now = asyncio.get_running_loop().time
                pick.on_unhealthy(lambda: None if limit.expired() else limit.reschedule(now()))
                status, answer = await self._send_prefill(pick, terms)
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
            self._prefilled = True
            self._legs.prefill_s = now_s - began
            shared.metrics.seconds.labels(shared.cluster.name).observe(now_s - began)
        pick.settle(outcome, now_s)
        return (answer if outcome is AttemptOutcome.SUCCESS else None), result

    async def _send_prefill(self, pick: Pick, terms: LegTerms) -> tuple[int, bytes]:
        request = self._request
        names = self._names
        inference = request.exchange.inference
        assert inference is not None
        if self._shared.connector.shortens:
            names = shorten(names, inference.kind)
        head = request.head_for(pick.endpoint)
        if pick.endpoint.rank is not None:
            head = head.with_rank(pick.endpoint.engine.ranks.number(pick.endpoint.rank))
        response = await request.pool.request(
            pick.endpoint.origin,
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
            await self._free_prefilled(pick, reading)
            raise
        finally:
            response.abort()
            await cancel_tasks([reading])

    async def _free_prefilled(self, pick: Pick, reading: asyncio.Task[bytes]) -> None:
        """Free the blocks that a prefill's answer names, which was under way as the client left."""
        await asyncio.wait([reading], timeout=FREEING_S)
        if not reading.done() or reading.exception() is not None:
            return
        with contextlib.suppress(NoHandle, HandleRefused):
            handle = self._make_handle(self._shared.connector.read_member(reading.result(), pick.endpoint))
            if member := self._take(handle):
                sent = asyncio.ensure_future(self._request.ask_whole(self._pick, member))
                await _let_go(sent, FREEING_S)

    def _take(self, handle: Handle) -> bytes:
        """Return what the decoder pulls by. Raises HandleRefused."""
        body = self._request.body.whole
        assert body is not None
        return handle.take(body, self._shared.clock())

    async def _pull(self, handle: Handle) -> Answer:
        """Return the answer of the decoder, which pulls; if it refuses to, it computes the prompt itself."""
        shared = self._shared
        try:
            member = self._take(handle)
        except HandleRefused:
            return await self._compute_here(LOCAL)
        self._count_as_pulled()
        self._sent = sent = asyncio.ensure_future(self._request.ask_whole(self._pick, member))
        answer = await self._await_decode(sent)
        if answer is None:
            again = self._prefill_beside() if self._elsewhere and self._reserve_another() else None
            return await (self._compute_here(LOCAL) if again is None else self._pull(again))
        response, status, first = answer
        if status >= 500 and status not in _NOT_ABOUT_KV:
            self._doubt()
            try:
                first, whole = await read_short(response, first)
            except BaseException:
                response.abort()
                raise
            if whole and _DEAD not in first and shared.connector.computes_alone:
                response.abort()
                return await self._compute_here(REFUSED)
            self._legs.result = FAILED
        elif status < 400:
            self._note_pulled()
        else:
            self._legs.result = ERROR
        return response, status, first

    def _note_pulled(self) -> None:
        shared = self._shared
        self._legs.result = PULLED
        self._request.exchange.outcome.prefill_endpoint = self._legs.prefill
        self._prefilled = True  # an engine may answer before the other leg has
        self._note_prompt_at(self._pick.endpoint)
        shared.metrics.tokens.labels(shared.cluster.name).inc(self._legs.tokens)

    async def _await_decode(self, sent: asyncio.Task[Answer]) -> Answer | None:
        """Wait for the decode leg within its limit; None: its prefill failed beside it."""
        limit_s = self._shared.settings.decode_timeout
        began = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(limit_s):
                return await asyncio.shield(sent)
        except TimeoutError:
            self._doubt()
            await cancel_tasks([sent])
            raise FirstByteTimeout(f"{self._pick.endpoint.id} gave no first byte within {limit_s:g} s") from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if sent.cancelled() and not (task is not None and task.cancelling()):
                return None
            left_s = FREEING_S - (asyncio.get_running_loop().time() - began)
            await _let_go(sent, left_s)
            raise
        except UpstreamError:
            self._doubt()
            raise

    async def _compute_here(self, result: str) -> Answer:
        """Send the request as the client sent it: the decoder computes the prompt. Raises NoPrefill."""
        if not self._shared.connector.computes_alone:
            raise NoPrefill(f"no endpoint has prefilled the prompt for {self._pick.endpoint.id}")
        self._legs.result = result
        self._pick.reservation.known = self._pick.decision.request.facts.searched
        self._count_at_decoder(self._local)
        self._note_prompt_at(self._pick.endpoint)
        return await self._plain.ask_whole(self._pick)

    def _doubt(self) -> None:
        """After a failed decode leg, have its pair examined before it is used again, and end its prefill leg."""
        if self._beside is not None:
            self._beside.cancel()
        prefill = self._shared.cluster.find_endpoint(self._legs.prefill)
        if prefill is not None:
            self._shared.pairs.doubt(prefill, self._pick.endpoint)

    def _count_as_pulled(self) -> None:
        """Count the prompt at the decoder as one that it pulls; no speed of prefills is learned from that."""
        facts = self._pick.decision.request.facts
        self._pick.reservation.known = False
        self._count_at_decoder(split_of_pulled(facts, self._pull_s))

    def _count_at_decoder(self, split: PromptSplit) -> None:
        self._pick.endpoint.load.begin(self._pick.reservation, split, self._shared.clock())

    def _note_prompt_at(self, endpoint: Endpoint) -> None:
        """Have caches' indexes know where the prompt is: also where an earlier prefill was done, used or not."""
        if (note := self._request.exchange.on_prompt_at) is not None:
            note(endpoint.id, self._prefilled)

    def _count_prefill(self, pick: Pick, result: str) -> None:
        name = self._shared.cluster.name
        self._shared.metrics.prefills.labels(name, str(pick.endpoint.id), result).inc()

    def _settle(self, outcome: AttemptOutcome) -> None:
        if self._prefill is not None:
            self._prefill.settle(outcome, self._shared.clock())


#: Failures after which another endpoint may prefill. Not of an engine that died of it: the next one would, too.
_ELSEWHERE = frozenset({"timeout", "unhealthy", "busy", "connect_error", "connect_timeout", "pool_full"})


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


async def _let_go(sent: asyncio.Task[Answer], left_s: float) -> None:
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
