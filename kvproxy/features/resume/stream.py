"""One stream that may go on elsewhere: follows its events, and makes the request for the rest when it breaks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from kvproxy.base.errors import EndpointUnhealthy, EngineReportedError, UpstreamDisconnected, UpstreamError
from kvproxy.base.types import Clock, RequestKind
from kvproxy.base.upstream.response import UpstreamResponse
from kvproxy.cluster.pick import Pick
from kvproxy.features.resume.breaks import Breaks
from kvproxy.features.resume.chat_form import MessageOfChat
from kvproxy.features.resume.events import DONE, read_data, split_events, strip_ids, with_data
from kvproxy.features.resume.metrics import ResumeMetrics
from kvproxy.features.resume.mismatch import Mismatch
from kvproxy.features.resume.note import ResumedLeg
from kvproxy.features.resume.plan import BrokenRequest, Plan, Wishes, plan_leg, read_request
from kvproxy.features.resume.progress import Progress
from kvproxy.features.resume.running import Moved, RunningStreams
from kvproxy.features.resume.settings import Grade
from kvproxy.features.resume.splice import Splice
from kvproxy.proxy.request.continuation import Leg
from kvproxy.proxy.request.exchange import Exchange
from kvproxy.proxy.request.usage import ERROR_MARK, error_status

#: Breaks of one stream that another engine may mend.
MAX_LEGS = 2
#: Moves of one stream off drained endpoints.
MAX_MOVES = 16
#: Time without a piece after which a stream leaves an unhealthy endpoint: probes of several may fail at once.
LEAST_SILENCE_S = 0.5
#: A longer event is passed on as it comes, and its stream is not resumed.
_MAX_EVENT_BYTES = 16 * 1024 * 1024
_ASK_IDS = b'"return_token_ids":true,'
#: Fields of answers whose bytes cannot be changed.
_FIXED = frozenset({b"content-encoding", b"content-length"})
#: Also of members that have another type than in the API.
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, AttributeError, TypeError)


class StreamEvents(Protocol):
    """Events of one API. `last` is a text in the event with the end of an answer; behind one with a text of `final`
    nothing has to come."""

    last: bytes
    final: tuple[bytes, ...]

    def read(self, data: bytes, progress: Progress) -> None:
        """Add an event of the first engine. Raises msgspec.DecodeError."""
        ...

    def join(self, data: bytes, progress: Progress, splice: Splice) -> bytes:
        """Return an event of a later engine as one of the first one's stream; b"": it is dropped. Raises Mismatch."""
        ...


class ResumableStream:
    """The continuation of one exchange."""

    def __init__(
        self,
        exchange: Exchange,
        events: StreamEvents,
        *,
        kind: RequestKind,
        wishes: Wishes,
        metrics: ResumeMetrics,
        clock: Clock,
        context_tokens: Callable[[Pick], int | None],
        is_proven: Callable[[Pick], bool],
        derenders: Callable[[Pick], bool],
        others_serve: Callable[[], bool],
    ) -> None:
        body = exchange.body or b""
        own = kind in (RequestKind.CHAT, RequestKind.COMPLETION) and b"return_token_ids" not in body
        self.member = _ASK_IDS if own else b""
        self.failure: UpstreamError | None = None
        self.withheld = b""
        self._events = events
        self._kind = kind
        self._wishes = wishes
        self._clock = clock
        self._context_tokens = context_tokens
        self._is_proven = is_proven
        self._derenders = derenders
        self._others_serve = others_serve
        self._progress = Progress()
        self._strips = own
        self._target = b""  # of the first request, as its engine got it
        self._body: bytes | None = None
        self._request: BrokenRequest | None = None
        self._pick: Pick | None = None
        self._response: UpstreamResponse | None = None
        self._running: RunningStreams | None = None  # where its endpoint finds it
        self._planned: Plan | None = None  # of a move
        self._splice: Splice | None = None
        self._converter: MessageOfChat | None = None  # of a leg with the events of a chat
        self._breaks = Breaks(exchange.outcome, metrics)
        self._broke_at = 0.0
        self._held = b""
        self._pieces = 0  # that came
        self._pieces_then = -1  # when a probe of the endpoint failed
        self._silent_since = 0.0
        self._ended = False  # its last event came
        self._debug = False
        self._endpoint = ""
        self.model = ""

    def follow(self, pick: Pick, response: UpstreamResponse, *, target: bytes, body: bytes | None) -> bool:
        """Follow a stream of events, and no other answer."""
        headers = dict(response.headers)
        streams = headers.get(b"content-type", b"").startswith(b"text/event-stream")
        if response.status != 200 or not streams or not headers.keys().isdisjoint(_FIXED):
            return False
        if self._response is None:
            self._target = target
            self._body = body
        self._response = response
        self._endpoint = str(pick.endpoint.id)
        self.model = pick.decision.request.model
        if self._running is not None:
            self._running.remove(self)
        self._running = RunningStreams.of(pick.endpoint)
        self._running.add(self)
        self._held = self.withheld = b""
        self.failure = None
        if self._wishes.context_tokens is None:
            self._wishes = self._wishes._replace(context_tokens=self._context_tokens(pick))
        self._pick = pick
        self._pieces_then = -1
        pick.on_unhealthy(self._leave_silent)
        self._look_at_engines()
        return True

    def next_piece(self, piece: bytes) -> bytes:
        """Return the whole events in what came, as the client gets them."""
        self._pieces += 1
        if self.failure is not None:
            if self._converter is None:  # else these are the events of another API
                self._withhold(piece)
            return b""
        events, self._held = split_events(self._held + piece if self._held else piece)
        if self._converter is not None:
            try:
                events = self._converter.convert(events)
            except Mismatch as error:
                self.failure = error
                events = []
        made = [self._take(event) for event in events]
        if len(self._held) > _MAX_EVENT_BYTES:
            self._progress.obstacle = "too_long"
            made.append(self._held)
            self._held = b""
        return made[0] if len(made) == 1 else b"".join(made)

    def finish(self, rest: bytes) -> bytes:
        """Return the end; a stream that lacks its last event broke."""
        last = self.next_piece(rest)
        if self.failure is not None:
            return last
        if not self._ended:
            self.failure = UpstreamDisconnected("the stream ended without its last event")
            return last
        return last + self._held

    def _take(self, event: bytes) -> bytes:
        if self.failure is not None:
            self._withhold(event)
            return b""
        data = read_data(event)
        if not data:
            return event
        if data == DONE:
            self._ended = True
            return event
        if ERROR_MARK in data and (status := error_status(event)) is not None:
            if status < 500:
                self._ended = True
                return event
            self.failure = EngineReportedError("the engine ended its stream with an error event", status=status)
            self.withheld = event
            return b""
        if any(mark in data for mark in self._events.final):
            self._ended = True
        return self._read(event, data) if self._splice is None else self._join(event, data, self._splice)

    def _withhold(self, piece: bytes) -> None:
        """Keep what follows an engine's own error event; what follows a mismatch is no part of this stream."""
        if self.withheld:
            self.withheld += piece

    def _read(self, event: bytes, data: bytes) -> bytes:
        try:
            self._events.read(data, self._progress)
        except _UNREADABLE:
            self._progress.obstacle = "unreadable"
        return strip_ids(event) if self._strips else event

    def _join(self, event: bytes, data: bytes, splice: Splice) -> bytes:
        began = splice.began
        try:
            made = self._events.join(data, self._progress, splice)
        except Mismatch as error:
            self.failure = error
            return b""
        except _UNREADABLE:
            self.failure = Mismatch("its events cannot be read")
            return b""
        if splice.began and not began:
            self._breaks.note_gap(self._clock() - self._broke_at)
        if self._debug and self._events.last in made:
            made = made[:-1] + b',"kvproxy":' + msgspec.json.encode({"resumed": self._breaks.legs}) + b"}"
        return with_data(event, made) if made else b""

    def move(self) -> str | None:
        """Have another engine go on with the stream. Return why it stays; "": it moves; None: it is over."""
        response = self._response
        if response is None or not self._is_running():
            return None
        plan = "moves" if self._breaks.count(moved=True) >= MAX_MOVES else self._plan()
        if isinstance(plan, str):
            return plan
        self._planned = plan
        self.failure = Moved()
        response.abort()
        return ""

    def _leave_silent(self) -> None:
        """Have another engine go on if nothing came between two failed probes of an unhealthy endpoint: a process that
        stands still closes no connection."""
        now = self._clock()
        if self._pieces != self._pieces_then:
            self._pieces_then = self._pieces
            self._silent_since = now
        silent = now - self._silent_since >= LEAST_SILENCE_S
        if silent and self._is_running() and self._others_serve() and isinstance(self._plan(), Plan):
            assert self._response is not None
            self.failure = EndpointUnhealthy(f"{self._endpoint} became unhealthy in the middle of this response")
            self._response.abort()

    def _is_running(self) -> bool:
        response = self._response
        over = self.failure is not None or self._ended
        return not (over or response is None or response.complete or response.error)

    def next_leg(self, error: UpstreamError, *, debug: bool) -> Leg | None:
        """Return the request for the rest, if the answer so far and the request allow it."""
        self._debug = debug
        self._broke_at = self._clock()
        self.member = b""
        broken = ResumedLeg(self._endpoint, error.reason, self._progress.tokens)
        if isinstance(error, Mismatch):
            plan: Plan | str = error.refusal
        elif self._planned is None and self._breaks.count(moved=False) >= MAX_LEGS:
            plan = "twice"
        else:
            plan = self._planned or self._plan()
        if isinstance(plan, str):
            self._breaks.add_refused(broken, plan)
            return None
        assert self._request is not None
        self._breaks.add(msgspec.structs.replace(broken, grade=plan.grade))
        self._splice = Splice(plan, self._progress, greedy=self._request.greedy)
        self._converter = MessageOfChat() if plan.as_chat else None
        if self._planned is None:
            return plan.leg
        self._planned = None
        self._breaks.count_move()
        return plan.leg._replace(moved=True)

    def _look_at_engines(self) -> None:
        """Have model and engine tried, if they were not; a trial may end while the stream runs."""
        if self._pick is None:
            return
        if self._wishes.grade is Grade.TEXT:
            self._wishes = self._wishes._replace(proven=self._is_proven(self._pick))
        if self._kind is RequestKind.CHAT:
            self._wishes = self._wishes._replace(derenders=self._derenders(self._pick))

    def _plan(self) -> Plan | str:
        """Return how the stream can go on from here, or why it cannot."""
        self._look_at_engines()
        if self._request is None:
            self._request = read_request(self._kind, self._target, self._body)
            wanted = self._request is not None and self._request.value("return_token_ids")
            self._progress.ids_wanted = wanted is True
        return "body" if self._request is None else plan_leg(self._request, self._progress, self._wishes)

    def refuse(self, reason: str) -> None:
        """Note that the proxy does not send the leg."""
        self._breaks.refuse(reason)
