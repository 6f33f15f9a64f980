"""One request in two legs: the prefill at one endpoint; then, or beside it, the answer at another.

Every failure before the first byte ends at the decoder, which computes the prompt itself, or in an error that the
forwarder knows how to retry. Nothing but the decode leg frees the blocks that a prefiller holds, so it is sent, and
then aborted, for a client that left meanwhile."""

from __future__ import annotations

import asyncio

import msgspec

from kvproxy.base.background_task import cancel_tasks
from kvproxy.base.errors import FirstByteTimeout, PoolFull, UpstreamDisconnected, UpstreamError
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.cluster.pick import Pick
from kvproxy.cluster.routing.work import PromptSplit
from kvproxy.features.disaggregation.bodies import Names
from kvproxy.features.disaggregation.connectors.base import LegTerms, NoHandle
from kvproxy.features.disaggregation.handle import Handle, HandleRefused
from kvproxy.features.disaggregation.note import ERROR, FAILED, LOCAL, PULLED, REFUSED, Legs
from kvproxy.features.disaggregation.plan import Plan, split_of_pulled
from kvproxy.features.disaggregation.prefill_leg import FREEING_S, PrefillLeg, Splitting, let_go, pull, take_member
from kvproxy.proxy.forward.answer import read_short
from kvproxy.proxy.forward.engine_request import Answer, EngineRequest

#: Endpoints that are asked to prefill one prompt, at most.
MAX_PREFILLS = 2
#: In the error of an engine that is dead, whatever the request.
_DEAD = b"EngineCore"
_NOT_ABOUT_KV = frozenset({501, 503})
#: Failures after which another endpoint may prefill. Not of an engine that died of it: the next one would, too.
_ELSEWHERE = frozenset({"timeout", "unhealthy", "busy", "connect_error", "connect_timeout", "pool_full"})


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
        self._prefill: PrefillLeg | None = None  # the latest
        self._pull_s = 0.0
        self._beside: asyncio.Task[None] | None = None  # the prefill leg of a connector that needs both at once
        self._sent: asyncio.Task[Answer] | None = None  # the decode leg
        self._elsewhere = False  # after the failure of a prefill beside it another endpoint may prefill

    def reserve(self, plan: Plan[Endpoint]) -> None:
        """Count the prefill in at its endpoint, and out at the decoder."""
        self._prefill = PrefillLeg(self._shared, plan.prefill, self._pick, names=self._names, legs=self._legs)
        self._pull_s = plan.pull_s
        self._count_as_pulled()
        self._note_prompt_at(plan.prefill)

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
            if self._prefill is not None and self._beside is None:
                self._prefill.settle()
            self._shared.metrics.requests.labels(self._shared.cluster.name, result).inc()

    async def _prefill_first(self) -> Handle | None:
        """Return what the decoder pulls by; None: no endpoint has prefilled the prompt."""
        while (leg := self._prefill) is not None:
            answer, result = await leg.ask(self._request, self._shared.connector.begin(leg.endpoint))
            handle = None
            if answer is not None:
                try:
                    handle = leg.make_handle(self._request, self._shared.connector.read_member(answer, leg.endpoint))
                except NoHandle:
                    result = "no_handle"
            leg.count(result)
            if handle is not None or result not in _ELSEWHERE or not self._reserve_another():
                return handle
        return None

    def _reserve_another(self) -> bool:
        """Have the next endpoint prefill, if there is one and few have tried."""
        if not self._others or self._legs.prefills >= MAX_PREFILLS:
            return False
        self.reserve(self._others.pop(0))
        return True

    def _prefill_beside(self) -> Handle | None:
        """Start the prefill leg, unless the decoder's side sends it; the decode leg need not wait for it."""
        leg = self._prefill
        assert leg is not None
        try:
            terms = self._shared.connector.begin(leg.endpoint)
        except NoHandle:
            leg.settle()
            return None
        if terms.fields:
            head = self._request.head
            fields = msgspec.structs.replace(head, own=[*head.own, *terms.fields])
            self._request = msgspec.structs.replace(self._request, head=fields)
        if self._shared.connector.sends_prefill:
            self._beside = self._shared.tasks.start(self._follow_prefill(leg, terms), name="prefill leg")
        return leg.make_handle(self._request, terms.decode)

    async def _follow_prefill(self, leg: PrefillLeg, terms: LegTerms) -> None:
        """Read the prefill's answer to its end, after the decoder's too; its failure ends the decode leg."""
        result = "left"
        try:
            _, result = await leg.ask(self._request, terms)
        finally:
            leg.count(result)
            leg.settle()
        if result != "done" and self._sent is not None:
            self._elsewhere = result in _ELSEWHERE
            self._sent.cancel()

    async def _pull(self, handle: Handle) -> Answer:
        """Return the answer of the decoder, which pulls; if it refuses to, it computes the prompt itself."""
        shared = self._shared
        try:
            member = take_member(handle, self._request, shared.clock())
        except HandleRefused:
            return await self._compute_here(LOCAL)
        self._count_as_pulled()
        self._sent = sent = pull(self._request, self._pick, member)
        try:
            answer = await self._await_decode(sent)
        except UpstreamDisconnected:  # also of a connection that was dead before
            if not shared.connector.computes_alone:
                raise
            return await self._compute_here(REFUSED)
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
        if self._prefill is not None:
            self._prefill.done = True  # an engine may answer before the other leg has
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
            await let_go(sent, left_s)
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
            note(endpoint.id, self._prefill is not None and self._prefill.done)
