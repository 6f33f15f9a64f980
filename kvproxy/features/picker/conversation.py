"""One request's conversation with Envoy: which message may come when, and what each is answered."""

from __future__ import annotations

import asyncio
import logging
from enum import Enum, auto

from kvproxy.base.background_task import TaskSet
from kvproxy.base.errors import UpstreamError
from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import Headers
from kvproxy.cluster.pick import AttemptOutcome
from kvproxy.features.picker import messages
from kvproxy.features.picker.grpc import Replies, Status
from kvproxy.features.picker.messages import Beginning, BodyMode, DecodeError, Message, ProcessingRequest
from kvproxy.features.picker.metrics import PickerMetrics
from kvproxy.operate.placing.carried import CarriedRequest, Placer
from kvproxy.operate.placing.external import address_of, engine_headers
from kvproxy.operate.placing.reservations import PickReservation
from kvproxy.proxy.forward.relay import LAST_PIECES, TAIL_BYTES, read_end
from kvproxy.proxy.request.body import BodiesFull, BodyTooLarge, HeldBodies, SharedTimer
from kvproxy.proxy.request.error_reply import LocalReply


class CarriedBody:
    """Pieces of one body, counted among those of all requests as long as they are held."""

    def __init__(self, held: HeldBodies, *, most_bytes: int) -> None:
        self.has_trailers = False
        self._held = held
        self._most_bytes = most_bytes
        self._pieces: list[bytes] = []
        self._size = 0

    def add(self, piece: bytes) -> None:
        """Hold a piece. Raises BodyTooLarge and BodiesFull."""
        if self._size + len(piece) > self._most_bytes:
            raise BodyTooLarge(self._most_bytes)
        self._held.hold_bytes(len(piece))
        self._size += len(piece)
        if piece:
            self._pieces.append(piece)

    def join(self) -> bytes:
        """Return all of it."""
        return b"".join(self._pieces)

    def drop_pieces(self) -> None:
        """Forget the pieces; the prompt is still held, and counted."""
        self._pieces = []

    def drop(self) -> None:
        """Forget it and count it no more."""
        self._held.give_back(self._size)
        self._pieces = []
        self._size = 0


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
        """Locate the answer: from `address` ("": not reported), or from the carrier itself (`details` show why). The
        load follows. Returns the relation to the pick, a metric label."""
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
        # The reason is not reported: the first could not be reached, or the carrier does not have it.
        request.settle(AttemptOutcome.CANCELLED if fallback is None else AttemptOutcome.UNPROVEN)
        if served is None:
            return "unknown"
        now = request.placer.clock()
        request.move_to(served, now)
        self._outcome.endpoint = served.id
        return "elsewhere" if fallback is None else "fallback"

    def piece(self, data: bytes) -> None:
        """Read a piece of the body."""
        if not data:
            return
        if not self._first:
            self._first = data
            inference = self._request.exchange.inference
            if inference is not None and inference.stream:
                self._request.first_byte(self._request.placer.clock())
        self._last.append(data)
        if len(self._last) > LAST_PIECES:
            del self._last[0]

    def completed(self) -> None:
        """Complete the answer."""
        request = self._request
        outcome = self._outcome
        outcome.end = outcome.end or "completed"
        request.answered(self._read_end() if self._last else None)

    def _read_end(self) -> UpstreamError | None:
        *earlier, last = self._last
        tail = b"".join(earlier)[-TAIL_BYTES:] + last
        request = self._request
        return read_end(
            request.exchange, self._outcome.status, self._headers, first=self._first, tail=tail, post=request.post
        )


log = logging.getLogger("kvproxy.picker")

_MODES = {BodyMode.BUFFERED: "buffered", BodyMode.BUFFERED_PARTIAL: "buffered", BodyMode.FULL_DUPLEX_STREAMED: "duplex"}
_WAITS_FOR_BODY = frozenset(_MODES)
_SEES_ANSWER = frozenset({BodyMode.STREAMED, BodyMode.FULL_DUPLEX_STREAMED})


class _Stage(Enum):
    HEADERS = auto()  # no message yet
    BODY = auto()  # the client's body is on its way
    PLACING = auto()
    PLACED = auto()  # the engine has it
    ANSWERED = auto()  # its answer is on its way
    OVER = auto()


class Conversations:
    """Factory of the conversation of each gRPC stream, with their shared state. Entered while any may run."""

    def __init__(self, placer: Placer, *, held: HeldBodies, metrics: Metrics) -> None:
        self.placer = placer
        self.held = held
        self.metrics = metrics
        limits = placer.target.config.limits
        self.most_bytes = limits.body
        self.tasks = TaskSet()
        self.bodies: SharedTimer[Conversation] = SharedTimer(limits.body_timeout, Conversation.body_is_late)

    def begin(self, replies: Replies) -> Conversation:
        """One request's."""
        return Conversation(self, replies)

    def count(self, mode: str, result: str) -> None:
        """Count a request by the end that its placement had."""
        self.metrics.group(PickerMetrics).requests.labels(mode, result).inc()


class Conversation:
    """A request is placed once its body is whole, or at its headers where Envoy sends no body or does not wait. It is
    over with its answer, or when Envoy ends the stream, which it keeps open as long as the request lives."""

    def __init__(self, shared: Conversations, replies: Replies) -> None:
        self._shared = shared
        self._replies = replies
        self._stage = _Stage.HEADERS
        self._mode = "headers"
        self._request: CarriedRequest
        self._answer: CarriedAnswer
        self._begun: Beginning
        self._body = CarriedBody(shared.held, most_bytes=shared.most_bytes)
        self._task: asyncio.Task[None] | None = None

    def message(self, raw: bytes) -> None:
        """As of Call."""
        if self._stage is _Stage.OVER:
            return
        try:
            said = ProcessingRequest.FromString(raw)
        except DecodeError:
            self._fail("malformed", Status.INVALID_ARGUMENT, "not a ProcessingRequest")
            return
        kind = said.WhichOneof("request")
        if kind == "request_headers" and self._stage is _Stage.HEADERS:
            self._take_headers(said)
        elif self._stage is _Stage.HEADERS:
            self._fail("malformed", Status.INVALID_ARGUMENT, "the first message is not request_headers")
        elif kind == "request_body":
            self._take_body(said.request_body.body, ended=said.request_body.end_of_stream)
        elif kind == "request_trailers":
            self._take_trailers()
        elif kind == "response_headers" and self._stage is not _Stage.ANSWERED:
            self._take_answer(said)
        elif kind == "response_body" and self._stage is _Stage.ANSWERED:
            self._take_piece(said.response_body.body, ended=said.response_body.end_of_stream)
        elif kind == "response_trailers" and self._stage is _Stage.ANSWERED:
            self._replies.send(messages.RESPONSE_TRAILERS_TAKEN)
            self._complete()
        else:
            self._fail("malformed", Status.INVALID_ARGUMENT, f"{kind} out of turn")

    def half_closed(self) -> None:
        """As of Call: the request is over."""
        self.gone()
        self._replies.end()

    def body_is_late(self) -> None:
        """Handle a body that did not arrive in time. Envoy may not expect an answer now: the stream ends, and the
        client gets `status_on_error`."""
        self._fail("body_timeout", Status.DEADLINE_EXCEEDED, "the request body did not arrive in time")

    def _take_headers(self, said: Message) -> None:
        begun = self._begun = messages.read_beginning(said)
        self._request = self._shared.placer.begin(begun.method, begun.path, begun.headers)
        if begun.ended or begun.request_mode not in _WAITS_FOR_BODY:
            self._place()
            return
        self._stage, self._mode = _Stage.BODY, _MODES[BodyMode(self._begun.request_mode)]
        self._shared.bodies.add(self)
        if self._mode == "buffered":
            self._replies.send(messages.REQUEST_HEADERS_TAKEN)

    def _take_body(self, body: bytes, *, ended: bool) -> None:
        if self._stage is not _Stage.BODY:
            if self._begun.request_mode in _WAITS_FOR_BODY:
                self._fail("malformed", Status.INVALID_ARGUMENT, "request_body out of turn")
            else:
                self._replies.send(messages.REQUEST_BODY_TAKEN)
            return
        try:
            self._body.add(body)
        except (BodyTooLarge, BodiesFull) as why:
            self._refuse(why)
            return
        if ended or self._mode == "buffered":
            self._place()

    def _take_trailers(self) -> None:
        if self._stage is not _Stage.BODY:
            self._replies.send(messages.REQUEST_TRAILERS_TAKEN)
            return
        self._body.has_trailers = True
        self._place()

    def _place(self) -> None:
        body = (self._body.join() or None) if self._request.reads_body else None
        self._shared.bodies.remove(self)
        self._stage = _Stage.PLACING
        self._task = self._shared.tasks.start(self._placing(body), name="place a request for Envoy")

    async def _placing(self, body: bytes | None) -> None:
        began = self._shared.placer.clock()
        try:
            sees = self._begun.response_mode in _SEES_ANSWER
            replaced = await self._request.place(body, subset=self._begun.subset, sees_answer=sees)
        except LocalReply as why:
            self._refuse(why)
            return
        except asyncio.CancelledError:
            self._request.settle(AttemptOutcome.CANCELLED)  # its turn may have come in the moment it was cancelled
            raise
        except Exception:
            log.exception("a request could not be placed")
            self._fail("error", Status.INTERNAL, "the picker failed; its log says why")
            return
        self._stage = _Stage.PLACED
        self._shared.metrics.group(PickerMetrics).seconds.observe(self._shared.placer.clock() - began)
        self._shared.count(self._mode, "picked")
        _send_picked(self._replies, self._request, self._body, replaced, mode=self._mode)
        self._body.drop_pieces()

    def _take_answer(self, said: Message) -> None:
        """Take the head of the answer: the engine's, or Envoy's own, which may come before the request is placed."""
        if self._stage is not _Stage.PLACED:
            self._replies.send(messages.RESPONSE_HEADERS_TAKEN)
            self.gone()
            return
        address, details = messages.served_by(said)
        self._answer = CarriedAnswer(self._request, *messages.read_answer(said))
        self._stage = _Stage.ANSWERED
        result = self._answer.locate(address, details)
        self._shared.metrics.group(PickerMetrics).served.labels(result).inc()
        exchange = self._request.exchange
        endpoint = exchange.outcome.endpoint
        local = result in ("none", "unknown") or endpoint is None
        own = exchange.request_id if exchange.upstream_id else ""  # the client's, where the engine gets another one
        self._replies.send(messages.RESPONSE_HEADERS_TAKEN if local else messages.served_headers(str(endpoint), own))
        if said.response_headers.end_of_stream:
            self._complete()

    def _take_piece(self, piece: bytes, *, ended: bool) -> None:
        self._answer.piece(piece)
        if self._begun.response_mode == BodyMode.FULL_DUPLEX_STREAMED:
            self._replies.send(messages.response_piece(piece, ended=ended), piece)
        else:
            self._replies.send(messages.RESPONSE_BODY_TAKEN)
        if ended:
            self._complete()

    def _complete(self) -> None:
        if self._stage is _Stage.ANSWERED:
            self._stage = _Stage.OVER
            self._body.drop()
            self._answer.completed()

    def _refuse(self, why: LocalReply) -> None:
        """Refuse the request: the client gets this from Envoy, and all its state is dropped."""
        self._stage = _Stage.OVER
        self._shared.bodies.remove(self)
        self._body.drop()
        self._shared.count(self._mode, "refused")
        self._replies.send(messages.refused(why, self._request.path))
        self._request.refused(why)

    def _fail(self, result: str, status: Status, what: str) -> None:
        self._shared.count(self._mode, result)
        self._replies.end(status, what)
        self.gone()

    def gone(self) -> None:
        """As of Call: end the conversation; a pick's reservation is given back."""
        stage = self._stage
        self._stage = _Stage.OVER
        if stage in (_Stage.OVER, _Stage.HEADERS):
            return
        self._shared.bodies.remove(self)
        self._body.drop()
        if self._task is not None:
            self._task.cancel()
        if stage is _Stage.ANSWERED and self._begun.response_mode == BodyMode.NONE:
            self._answer.completed()  # its only visible end
        else:
            self._request.left()


def _send_picked(
    replies: Replies, request: CarriedRequest, body: CarriedBody, replaced: bytes | None, *, mode: str
) -> None:
    """Name the endpoints, with the body as far as Envoy wants it back."""
    listed = request.listed
    destinations = [address_of(each) for each in listed]
    headers = engine_headers(request.exchange, listed[0])
    replies.send(messages.picked(destinations, headers, with_body=mode == "buffered", body=replaced))
    if mode != "duplex":
        return
    whole = body.join() if replaced is None else replaced
    for head, piece in messages.request_pieces(whole, ended=not body.has_trailers):
        replies.send(head, piece)
    if body.has_trailers:
        replies.send(messages.REQUEST_TRAILERS_TAKEN)
