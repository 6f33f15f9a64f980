"""ThunderAgent's rule (arXiv 2602.13692, and its scheduler of mode `tr` with its defaults)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvproxy.lab.replay.router import LiveRequest, SimEndpoint
from kvproxy.lab.replay.session_rules import Grant
from kvproxy.lab.simulator.timing import EngineTiming

TICK_S = 5.0
BUFFER_TOKENS = 100  # that each program needs beyond its context
FORCE_AFTER_S = 1800.0


@dataclass(slots=True, eq=False)
class Program:
    """A session. `place` is its endpoint; None: it is paused."""

    session: int
    tokens: int = 0
    steps: int = 0
    place: SimEndpoint | None = None
    reasoning: bool = False  # a request is with the engine, or waits here
    marked: bool = False  # to be paused at the end of its request
    waiting: deque[LiveRequest] = field(default_factory=deque)
    waits_since: float = 0.0

    @property
    def required_tokens(self) -> int:
        """Tokens it takes on an endpoint."""
        return self.tokens + BUFFER_TOKENS


class ThunderAgent:
    """Programs take their context on one endpoint until they are paused. Every 5 s: those that wait are resumed, first
    those in the middle of their work, then new ones, then those without a request, the smallest first, as many as fit
    all endpoints together, placed by best fit; on an endpoint that is over its memory the smallest are paused, those
    between turns at once and others after their request. (Its code does not deduct the latter, and so marks all of
    them; here they are deducted, as its paper has it.)"""

    def __init__(self, _timing: EngineTiming | None = None) -> None:
        self._endpoints: Sequence[SimEndpoint] = ()
        self._programs: dict[int, Program] = {}
        self._ready: deque[Grant] = deque()
        self._tick_at = TICK_S
        self._shared: dict[int, float] = {}  # tokens that programs share, by endpoint, as of the last tick

    def begin(self, endpoints: Sequence[SimEndpoint]) -> None:
        self._endpoints = endpoints

    def offer(self, request: LiveRequest, now: float) -> None:
        if not self._programs:
            self._tick_at = now + TICK_S
        paused = any(each.place is None for each in self._programs.values())
        program = self._programs.setdefault(request.session, Program(request.session))
        program.steps += 1
        program.tokens = request.turn.prompt_tokens
        program.reasoning = True
        if program.steps == 1 and not paused:
            program.place = self._roomiest(program)
        if program.place is None:
            program.waiting.append(request)
            program.waits_since = now
        else:
            self._ready.append(Grant(request, program.place))

    def take(self, now: float) -> Grant | None:
        if now >= self._tick_at and self._programs:
            self._tick(now)
        return self._ready.popleft() if self._ready else None

    def next_at(self, now: float) -> float | None:
        if self._ready:
            return now
        return self._tick_at if self._programs else None

    def ended(self, request: LiveRequest, endpoint: SimEndpoint, now: float, *, last: bool) -> None:
        program = self._programs.get(request.session)
        if program is None:
            return
        if last:
            del self._programs[request.session]
            return
        program.reasoning = False
        program.tokens = request.turn.prompt_tokens + request.turn.output_tokens
        if program.marked:
            self._pause(program)

    def left(self, endpoint: SimEndpoint) -> None:
        for program in self._programs.values():
            if program.place is endpoint:
                self._pause(program)
        for grant in [one for one in self._ready if one.endpoint is endpoint]:
            self._ready.remove(grant)
            self._programs[grant.request.session].waiting.append(grant.request)

    def _pause(self, program: Program) -> None:
        program.place = None
        program.marked = False

    def _tick(self, now: float) -> None:
        self._tick_at = now + TICK_S
        self._observe_shared()
        self._resume(now)
        for endpoint in self._endpoints:
            self._pause_until_it_fits(endpoint)

    def _observe_shared(self) -> None:
        """Of running requests' tokens, those that the engine's usage does not show."""
        for endpoint in self._endpoints:
            reasoning = sum(each.tokens for each in self._on(endpoint) if each.reasoning)
            used = endpoint.engine.load.kv_usage * _capacity_tokens(endpoint)
            self._shared[endpoint.index] = max(0.0, reasoning - used)

    def _on(self, endpoint: SimEndpoint) -> list[Program]:
        return [each for each in self._programs.values() if each.place is endpoint]

    def _remaining(self, endpoint: SimEndpoint) -> float:
        used = sum(each.required_tokens for each in self._on(endpoint)) - self._shared.get(endpoint.index, 0.0)
        return _capacity_tokens(endpoint) - used

    def _roomiest(self, program: Program) -> SimEndpoint | None:
        """Return the endpoint with the fewest tokens of programs, if the program fits."""
        fits = [one for one in self._endpoints if self._remaining(one) >= program.required_tokens]
        return min(fits, key=lambda one: sum(each.tokens for each in self._on(one)), default=None)

    def _resume(self, now: float) -> None:
        paused = [each for each in self._programs.values() if each.place is None]
        for program in paused:
            if program.waiting and now - program.waits_since >= FORCE_AFTER_S and self._endpoints:
                self._go_on(program, min(self._endpoints, key=lambda one: len(self._on(one))))
        rooms = {one.index: self._remaining(one) for one in self._endpoints}
        rooms = {index: room for index, room in rooms.items() if room > BUFFER_TOKENS}
        chosen: list[Program] = []
        left = sum(rooms.values())
        for program in sorted((each for each in paused if each.place is None), key=_urgency):
            if program.required_tokens <= left:
                chosen.append(program)
                left -= program.required_tokens
        for program in sorted(chosen, key=lambda each: -each.tokens):
            index = max(rooms, key=lambda one: rooms[one], default=None)
            if index is None:
                return
            if program.required_tokens <= rooms[index]:
                self._go_on(program, next(one for one in self._endpoints if one.index == index))
                rooms[index] -= program.required_tokens
                if rooms[index] <= BUFFER_TOKENS:
                    del rooms[index]

    def _go_on(self, program: Program, endpoint: SimEndpoint) -> None:
        program.place = endpoint
        while program.waiting:
            self._ready.append(Grant(program.waiting.popleft(), endpoint))

    def _pause_until_it_fits(self, endpoint: SimEndpoint) -> None:
        excess = -self._remaining(endpoint) - sum(each.required_tokens for each in self._on(endpoint) if each.marked)
        for program in sorted(self._on(endpoint), key=lambda each: (each.reasoning, each.tokens)):
            if excess <= 0:
                return
            if program.marked:
                continue
            excess -= program.required_tokens
            if program.reasoning:
                program.marked = True
            else:
                self._pause(program)


def _urgency(program: Program) -> tuple[int, int]:
    if program.steps == 1:
        return 1, program.tokens
    return (0 if program.reasoning else 2), program.tokens


def _capacity_tokens(endpoint: SimEndpoint) -> int:
    settings = endpoint.engine.settings
    return settings.capacity_blocks * settings.block_size
