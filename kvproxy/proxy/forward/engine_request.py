"""One attempt's question to an engine: what is added for it (its credential, the rank, a number), and asked again
without what it refuses."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Coroutine
from typing import Protocol

import msgspec

from kvproxy.base.types import EndpointId, RequestKind
from kvproxy.base.upstream.pool import Timeouts, UpstreamPool, UpstreamResponse
from kvproxy.base.upstream.request import Body
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.cluster.feature import NumberedRequest, RequestAddition
from kvproxy.cluster.pick import Pick
from kvproxy.cluster.routing.policy import NO_FACTS
from kvproxy.proxy.forward.answer import read_beginning, read_short
from kvproxy.proxy.forward.headers import RequestHead
from kvproxy.proxy.forward.request_body import RequestBody
from kvproxy.proxy.placement import MAX_PRIORITY, priority_of
from kvproxy.proxy.request.continuation import Leg
from kvproxy.proxy.request.exchange import Exchange
from kvproxy.proxy.request.usage import ERROR_MARK

#: The response, its status or that of an error that a stream begins with, and the first piece.
Answer = tuple[UpstreamResponse, int, bytes]

_BAD_REQUEST = 400
#: SGLang reads the rank here, too: newer versions for Responses, older ones for the others. (The guard cuts out a
#: client's own; a trusted one's comes later in the body and wins.)
_RANK_MEMBER = b'"routed_dp_rank":%d,'
_WITH_FIELD = frozenset({RequestKind.CHAT, RequestKind.COMPLETION, RequestKind.RESPONSES})
#: Errors about a missing data-parallel rank: of vLLM and SGLang, and of vLLM's front end in Rust, which does not give
#: the reason.
_NO_SUCH_RANK = re.compile(rb"data.parallel.rank|dp.rank|engine-core error", re.IGNORECASE)

#: APIs whose bodies are read as a JSON object.
_NUMBERED = frozenset({RequestKind.CHAT, RequestKind.COMPLETION, RequestKind.MESSAGES, RequestKind.RESPONSES})


class SplitsRequests(Protocol):
    """Sends requests of one cluster in legs: the prompt is computed at another endpoint first."""

    def split(self, request: EngineRequest, pick: Pick) -> Coroutine[None, None, Answer] | None:
        """Return the answer of the pick's endpoint after its first leg; None: the request goes there as a whole. What
        it reserves is reserved in this turn of the event loop, and settled by the coroutine."""
        ...


class HedgesRequests(Protocol):
    """Sends requests of one cluster that wait for too long to a second endpoint."""

    def race(
        self, request: EngineRequest, pick: Pick, may_send: Callable[[], bool]
    ) -> Coroutine[None, None, tuple[Pick, Answer]] | None:
        """Return the answer that came first, and its place; None: the request is sent once. `may_send` takes a second
        sending from the retry budget. Settles what it reserves, and the pick of the attempt if another one answers."""
        ...


class EngineRequest(msgspec.Struct, eq=False):
    """State shared by all attempts of one request. If an engine refuses an optional field (a number, the data-parallel
    rank), the request is sent again without it at once."""

    exchange: Exchange
    pool: UpstreamPool
    timeouts: Timeouts
    cluster: Cluster
    method: bytes
    target: bytes
    head: RequestHead
    body: RequestBody
    #: Data-parallel rank set by a trusted client, which is kept.
    own_rank: bytes | None
    #: Called with a response whose head came before its body.
    on_head: Callable[[Pick, UpstreamResponse], None]
    #: None: requests of the cluster go to one endpoint.
    legs: SplitsRequests | None = None
    #: A connection that proves dead is not replaced: the engine may have begun.
    once: bool = False

    @property
    def level(self) -> int:
        """Level of the request's class, larger first: from the configured header, and as a trusted client expects."""
        header = self.cluster.settings.queue.priority_header
        level = priority_of(self.head.headers, header.lower().encode()) if header else 0
        hints = self.exchange.hints
        return level if hints is None else max(-MAX_PRIORITY, min(MAX_PRIORITY, level + hints.level))

    def other_ranks(self) -> frozenset[EndpointId]:
        """Endpoints that a request for its own rank cannot mean; none where no engine is known to have that rank."""
        asked = self.own_rank or b""
        ranked = {one.id: b"%d" % one.rank for one in self.cluster.endpoints if one.rank is not None}
        return frozenset(one for one, rank in ranked.items() if rank != asked and asked in ranked.values())

    def ask_engine(self, pick: Pick) -> Coroutine[None, None, Answer]:
        """Return the engine's answer. (A coroutine around `_send` would be resumed with it.)"""
        if self.legs is not None and (answer := self.legs.split(self, pick)) is not None:
            return answer
        return self.ask_whole(pick)

    def ask_whole(self, pick: Pick, member: bytes = b"") -> Coroutine[None, None, Answer]:
        """Return the answer to the request as the client sent it, with a member in front of those of its body."""
        endpoint = pick.endpoint
        head = self.head
        if endpoint.authorization is not None or self.exchange.trace_parent:
            head = self.head_for(endpoint)
        if endpoint.rank is None or self.own_rank is not None:
            return self._ask(pick, head, member)
        return self._ask_rank(pick, head, endpoint.engine.ranks.number(endpoint.rank), member)

    def head_for(self, endpoint: Endpoint) -> RequestHead:
        """Return the head for this endpoint, with its credential."""
        head = self.head
        if endpoint.authorization is not None:
            head = head.with_credential(endpoint.authorization)
        if self.exchange.trace_parent:
            head = head.with_trace_parent(self.exchange.trace_parent)
        return head

    def with_leg(self, leg: Leg) -> EngineRequest:
        """Return the request for the rest of a stream, which goes to one endpoint."""
        return msgspec.structs.replace(self, target=leg.target, body=self.body.with_bytes(leg.body), legs=leg.parts)

    def ask(self, pick: Pick, target: bytes, body: bytes) -> Coroutine[None, None, Answer]:
        """Return the answer to another request of the same client, as of AsksEngines."""
        return self.with_leg(Leg(target, body)).ask_whole(pick)

    def _rank_member(self, pick: Pick, number: int) -> bytes:
        """Return the field for engines that do not read the header everywhere."""
        inference = self.exchange.inference
        if not pick.endpoint.engine.ranks.in_body or inference is None or inference.kind not in _WITH_FIELD:
            return b""
        return _RANK_MEMBER % number if inference.model or inference.prompt.parts else b""

    async def _ask_rank(self, pick: Pick, head: RequestHead, number: int, member: bytes) -> Answer:
        ranked = self._rank_member(pick, number) + member
        response, status, first = await self._ask(pick, head.with_rank(number), ranked)
        if status != _BAD_REQUEST or self.body.whole is None:
            return response, status, first
        first, refused = await _refused(response, first, lambda error: _NO_SUCH_RANK.search(error) is not None)
        if not refused:
            return response, status, first
        named = b"rank" in first.lower()
        response, status, first = await self._ask(pick, head, member)
        if status < 400:
            self.cluster.ranks.record_refusal(pick.endpoint, number, named=named)
        return response, status, first

    def _ask(self, pick: Pick, head: RequestHead, member: bytes = b"") -> Coroutine[None, None, Answer]:
        """`member` is written in front of those of the body."""
        if self.body.whole is not None:
            continuation = self.exchange.continuation
            if continuation is not None:
                member += continuation.member
            addition = self.exchange.addition
            if addition is not None and (number := self._choose_number(addition, pick)) is not None:
                return self._ask_with_number(addition, pick, head, number, member)
        return self._send(pick, head, member)

    def _choose_number(self, addition: RequestAddition, pick: Pick) -> int | None:
        """Return the number that the request goes with, noted on its outcome; None: it goes without.

        The body is a JSON object without such a member of its own: what was parsed as a request has at least one
        member, and the guard has cut a client's own.
        """
        exchange = self.exchange
        exchange.outcome.notes.pop(addition.note, None)  # an earlier attempt's
        inference = exchange.inference
        if inference is None or inference.kind not in _NUMBERED or not (inference.model or inference.prompt.parts):
            return None
        facts = exchange.facts or NO_FACTS
        asked = NumberedRequest(facts, exchange.received_at, self.level, exchange.own_number, exchange.tenant)
        number = addition.choose_number(pick, asked)
        if number is not None:
            exchange.outcome.notes[addition.note] = number
        return number

    async def _ask_with_number(
        self, addition: RequestAddition, pick: Pick, head: RequestHead, number: int, member: bytes
    ) -> Answer:
        numbered = b'"%b":%d,' % (addition.member.encode(), number)
        response, status, first = await self._send(pick, head, numbered + member)
        if status not in addition.refusals:
            return response, status, first
        first, refused = await _refused(response, first, addition.is_named)
        if not refused:
            return response, status, first
        del self.exchange.outcome.notes[addition.note]
        response, status, first = await self._send(pick, head, member)
        if status < 400:
            addition.record_refusal(pick.endpoint)
        return response, status, first

    async def _send(self, pick: Pick, head: RequestHead, member: bytes) -> Answer:
        whole = self.body.whole
        start = b""
        body: Body = self.body.take() if whole is None else whole
        if member and whole is not None:
            start, body = in_front(whole, member)
        response = await self.pool.request(
            pick.endpoint.origin,
            self.method,
            self.target,
            head.own if whole is not None else head.own + self.body.framing,
            body,
            start=start,
            timeouts=self.timeouts,
            early=False,
            once=self.once,
            on_head=functools.partial(self.on_head, pick),
            repeated=head.repeated,
        )
        status = response.status
        first = b""
        try:
            if status < 500:  # the first piece has arrived, or the end
                first = response.take() or b""
                if status == 200 and ERROR_MARK in first:  # an engine that died in its prefill streams an error
                    status, first = await read_beginning(response, first)
            return response, status, first
        except BaseException:
            response.abort()
            raise


def in_front(body: bytes, member: bytes) -> tuple[bytes, memoryview]:
    """Return the beginning of a JSON object, its brace and the member, and the rest of it."""
    at = body.index(b"{") + 1
    return body[:at] + member, memoryview(body)[at:]


async def _refused(response: UpstreamResponse, first: bytes, names: Callable[[bytes], bool]) -> tuple[bytes, bool]:
    """Return what was read of an error, and whether `names` finds its cause there: then the response is done with."""
    try:
        first, complete = await read_short(response, first)
    except BaseException:
        response.abort()
        raise
    refused = complete and names(first)
    if refused:
        response.abort()
    return first, refused
