"""vllm-router's program scheduling (0.1.17, `progress-TTL`), with its defaults, its recommended global queue, the
engines' true capacity and speeds as its options have them, and new programs bound where the fewest are."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from statistics import fmean

from kvproxy.lab.replay.router import LiveRequest, SimEndpoint
from kvproxy.lab.replay.session_rules import Grant
from kvproxy.lab.simulator.timing import EngineTiming

TICK_S = 1.0
WINDOW = 100  # samples before anything is learned, and that are kept
MAX_PROGRAMS = 64  # on an endpoint
DECODE_TOKENS = 100  # that each program needs beyond its context
MAX_TTL_S = 10.0
MAX_ROUNDS = 14  # in a row, before a program gives way to others
SHARED_FOR_S = 100.0  # that the number of tokens shared with others is not looked at again
FORCE_AFTER_S = 300.0
FORCE_NOT_BEFORE_S = 30.0
HEADROOM = 1.2  # contexts that an endpoint must have free beyond a program's own one to take it over
CONTINUOUS = 0.9  # share of the last context that is found while a program's rounds are in a row
DECODE_KEPT = 0.15  # share of its throughput that decoding keeps beside a prefill


class Paused(Enum):
    """Why a program has no place."""

    NEW = auto()
    EXPIRED = auto()
    CAPACITY = auto()
    YIELDED = auto()


@dataclass(slots=True, eq=False)
class Program:
    """A session, bound to an endpoint, where it has a place or not."""

    session: int
    home: SimEndpoint
    active: bool = False
    paused: Paused = Paused.NEW
    context: int = 0
    shared: int = 0  # leading tokens that other programs have too: as found when it began anew
    shared_until: float = 0.0
    served: int = 0  # requests
    rounds: int = 0  # in a row since it got its place
    rounds_since_expiry: int = 0
    last_context: int = 0
    ended_at: float | None = None
    impact_s: float = 0.0  # of computing its context anew
    expires_at: float | None = None
    begun_at: float = 0.0
    queued_at: float = 0.0
    forced_at: float = math.inf
    pause_when_idle: bool = False
    starts: bool = False  # its next end is that of the first request in this place
    in_flight: int = 0
    waiting: deque[LiveRequest] = field(default_factory=deque)

    @property
    def tokens(self) -> int:
        """Tokens of its own that it takes."""
        return max(0, self.context - self.shared) + DECODE_TOKENS

    @property
    def acting(self) -> bool:
        """True if it has a place and no request."""
        return self.active and not self.in_flight and not self.waiting


@dataclass(slots=True)
class Window:
    """Samples of one endpoint's latest requests."""

    prompts: deque[int] = field(default_factory=lambda: deque(maxlen=WINDOW))
    answers: deque[int] = field(default_factory=lambda: deque(maxlen=WINDOW))
    growths: deque[int] = field(default_factory=lambda: deque(maxlen=WINDOW))
    decodes_s: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    rounds: deque[int] = field(default_factory=lambda: deque(maxlen=WINDOW))
    ends: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    gaps_s: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    @property
    def mature(self) -> bool:
        """True if requests are known well."""
        return len(self.prompts) >= WINDOW

    @property
    def target_rounds(self) -> float:
        """Rounds in a row that a program is to have."""
        return min(MAX_ROUNDS, max(1, math.ceil(2 * _mean(self.rounds)))) if self.mature else 0.0

    @property
    def throughput(self) -> float:
        """Requests a second."""
        span = self.ends[-1] - self.ends[0] if len(self.ends) > 1 else 0.0
        return (len(self.ends) - 1) / span if span > 0 else 0.0

    def ttl_s(self, impact_s: float) -> float:
        """Return how long to keep the place of a program between turns: where the prefill that it saves outweighs the
        time that its memory lies idle the most, by a log-normal fit of the gaps."""
        gaps = [gap for gap in self.gaps_s if gap > 0]
        most = min(MAX_TTL_S, impact_s)
        if len(self.gaps_s) < WINDOW or not gaps or most <= 0:
            return 0.0
        logs = [math.log(gap) for gap in gaps]
        mean = _mean(logs)
        sigma = max(1e-6, math.sqrt(_mean([(each - mean) ** 2 for each in logs])))
        least = min(0.05, most)
        tried = [least * math.exp(math.log(most / least) * step / 31) for step in range(32)]
        return max([0.0, *tried], key=lambda ttl: _utility(ttl, impact_s, mean, sigma))


class Room:
    """One endpoint, as long as no program gets or loses its place or begins to wait."""

    def __init__(self, endpoint: SimEndpoint, window: Window, programs: Sequence[Program]) -> None:
        here = [each for each in programs if each.home is endpoint]
        self.window = window
        self.programs = [each for each in here if each.active]
        self.queued = sum(1 for each in here if each.waiting and not each.active)
        self.free = _capacity_tokens(endpoint) - sum(each.tokens for each in self.programs)
        self.growth = _mean(window.growths) if window.mature else 0.0  # tokens a round
        self.target = window.target_rounds
        self.protected = [each for each in self.programs if self.target > each.rounds]
        self.rounds = sum(self.target - each.rounds for each in self.protected)  # that its programs are to have
        self.running = [each for each in self.programs if not each.acting]
        self.context = sum(each.context for each in self.running)
        self.decode_s = _mean(window.decodes_s)
        self.impact_s = _mean([each.impact_s for each in self.protected])


class VllmRouter:
    """Programs have a place from a request until their time between turns (its limit is learned) is over, the memory is
    over-full, or others wait and they had 14 requests in a row. Those that wait go on at their endpoint, the one that
    ended last first, when their context fits beside the growth that those there still need, or when a larger batch is
    worth more; elsewhere if that has much more room; and anywhere once they waited too long."""

    def __init__(self, timing: EngineTiming) -> None:
        self._timing = timing
        self._endpoints: Sequence[SimEndpoint] = ()
        self._programs: dict[int, Program] = {}
        self._windows: dict[int, Window] = {}
        self._waiting_in_engine: dict[int, int] = {}
        self._ready: deque[Grant] = deque()
        self._tick_at = 0.0
        self._rooms: dict[int, Room] = {}  # by endpoint, until something changes

    def begin(self, endpoints: Sequence[SimEndpoint]) -> None:
        self._endpoints = endpoints

    def offer(self, request: LiveRequest, now: float) -> None:
        program = self._programs.get(request.session)
        if program is None:
            home = min(self._endpoints, key=lambda one: sum(each.home is one for each in self._programs.values()))
            program = self._programs[request.session] = Program(request.session, home)
        elif program.ended_at is not None and not program.in_flight:
            self._window(program.home).gaps_s.append(now - program.ended_at)
        program.context = max(program.context, request.turn.prompt_tokens)
        if program.active:
            program.in_flight += 1
            self._ready.append(Grant(request, program.home))
            return
        if not program.waiting:
            program.queued_at = now
            program.forced_at = now + self._force_after_s(program)
        program.waiting.append(request)
        self._rooms.clear()
        self._schedule(now)

    def take(self, now: float) -> Grant | None:
        if now >= self._tick_at and self._programs:
            for one in self._endpoints:
                self._waiting_in_engine[one.index] = one.engine.load.waiting
            self._tick_at = now + TICK_S
            self._decide(now)
        return self._ready.popleft() if self._ready else None

    def next_at(self, now: float) -> float | None:
        if self._ready:
            return now
        return self._tick_at if self._programs else None

    def ended(self, request: LiveRequest, endpoint: SimEndpoint, now: float, *, last: bool) -> None:
        program = self._programs.get(request.session)
        if program is None or not program.in_flight:
            return
        self._rooms.clear()
        program.in_flight -= 1
        if last:
            del self._programs[request.session]
        else:
            self._learn(program, request, now)
            self._keep(program, now)
        self._decide(now)

    def left(self, endpoint: SimEndpoint) -> None:
        lost = [one.request for one in self._ready if one.endpoint is endpoint]
        self._ready = deque(one for one in self._ready if one.endpoint is not endpoint)
        for request in lost:
            self._programs[request.session].waiting.append(request)
        for program in self._programs.values():
            if program.home is endpoint:
                program.in_flight = 0
                self._pause(program, Paused.CAPACITY)
                program.home = self._endpoints[0] if self._endpoints else endpoint

    def _window(self, endpoint: SimEndpoint) -> Window:
        window = self._windows.get(endpoint.index)
        if window is None:
            window = self._windows[endpoint.index] = Window()
        return window

    def _impact_s(self, tokens: int) -> float:
        """Return the cost of computing so many tokens, the slower decoding beside it included."""
        return self._timing.prefill_s(tokens, 0) * (2.0 - DECODE_KEPT)

    def _learn(self, program: Program, request: LiveRequest, now: float) -> None:
        outcome = request.outcome
        prompt = request.turn.prompt_tokens
        before = program.last_context
        program.impact_s = self._impact_s(max(0, prompt - program.shared))
        continuous = not before or outcome.cached_tokens >= CONTINUOUS * before
        if program.starts and (not before or not continuous):
            program.begun_at = outcome.placed_at or now
            if now >= program.shared_until:
                program.shared = min(outcome.cached_tokens, prompt)
                program.shared_until = now + SHARED_FOR_S
        program.starts = False
        program.served += 1
        program.rounds += continuous
        program.rounds_since_expiry += continuous
        program.last_context = prompt
        program.ended_at = now
        window = self._window(program.home)
        window.prompts.append(prompt)
        window.answers.append(request.turn.output_tokens)
        window.rounds.append(program.rounds_since_expiry)
        window.ends.append(now)
        if 0 < prompt - before < before:
            window.growths.append(prompt - before)
        if outcome.first_token_at is not None:
            window.decodes_s.append(now - outcome.first_token_at)

    def _keep(self, program: Program, now: float) -> None:
        """Decide on the place of a program whose request ended."""
        if not program.acting:
            return
        if program.pause_when_idle:
            self._pause(program, Paused.CAPACITY)
            return
        program.expires_at = now + self._window(program.home).ttl_s(program.impact_s)
        if program.rounds >= MAX_ROUNDS and self._room(program.home).queued:
            self._pause(program, Paused.YIELDED)

    def _pause(self, program: Program, why: Paused) -> None:
        self._rooms.clear()
        program.active = program.pause_when_idle = False
        program.paused = why
        program.rounds = 0
        program.expires_at = None

    def _decide(self, now: float) -> None:
        for program in self._programs.values():
            if program.acting and program.expires_at is not None and program.expires_at <= now:
                self._pause(program, Paused.EXPIRED)
                program.rounds_since_expiry = 0
        for endpoint in self._endpoints:
            self._repair(endpoint, now)
        self._schedule(now)

    def _room(self, endpoint: SimEndpoint) -> Room:
        room = self._rooms.get(endpoint.index)
        if room is None:
            room = Room(endpoint, self._window(endpoint), list(self._programs.values()))
            self._rooms[endpoint.index] = room
        return room

    def _repair(self, endpoint: SimEndpoint, now: float) -> None:
        """Take places away where the memory is over-full, from long services and small contexts first."""
        window = self._window(endpoint)
        room = self._room(endpoint)
        answer = math.ceil(_mean(window.answers))
        excess = answer * sum(not each.acting for each in room.programs) - room.free
        if excess <= 0:
            return
        prompt = max(1.0, _mean(window.prompts))

        def score(program: Program) -> float:
            size = max(1e-6, program.context / prompt)
            return -(now - program.begun_at) * max(0.5, 1 / math.sqrt(size))

        for program in sorted((each for each in room.programs if not each.pause_when_idle), key=score):
            if excess <= 0:
                return
            excess -= program.tokens + (0 if program.acting else answer)
            if program.acting:
                self._pause(program, Paused.CAPACITY)
            else:
                program.pause_when_idle = True

    def _schedule(self, now: float) -> None:
        def local(program: Program) -> tuple[bool, bool, float, float]:
            ended_at = -math.inf if program.ended_at is None else program.ended_at
            return program.forced_at > now, program.paused is Paused.YIELDED, -ended_at, program.queued_at

        def elsewhere(program: Program) -> tuple[bool, bool, float]:
            return program.forced_at > now, program.paused is Paused.YIELDED, program.queued_at

        self._admit_first(local, lambda program: program.home if self._admits(program, program.home, now) else None)
        if any(not self._room(one).queued for one in self._endpoints):
            self._admit_first(elsewhere, lambda program: self._find_elsewhere(program, now))

    def _admit_first(
        self, order: Callable[[Program], tuple[float, ...]], find: Callable[[Program], SimEndpoint | None]
    ) -> None:
        """Admit the first for which there is an endpoint, until there is none for any of them."""
        waiting = sorted((each for each in self._programs.values() if each.waiting and not each.active), key=order)
        while waiting:
            for program in waiting:
                if (endpoint := find(program)) is not None:
                    self._admit(program, endpoint)
                    waiting.remove(program)
                    break
            else:
                return

    def _admit(self, program: Program, endpoint: SimEndpoint) -> None:
        self._rooms.clear()
        program.home = endpoint
        program.active = program.starts = True
        program.rounds = 0
        program.forced_at = math.inf
        program.in_flight += len(program.waiting)
        while program.waiting:
            request = program.waiting.popleft()
            program.begun_at = program.begun_at or request.outcome.arrived_at
            self._ready.append(Grant(request, endpoint))

    def _admits(self, program: Program, endpoint: SimEndpoint, now: float) -> bool:
        if program.forced_at <= now:
            return True
        room = self._room(endpoint)
        if self._waiting_in_engine.get(endpoint.index, 0) >= 1 or len(room.programs) >= MAX_PROGRAMS:
            return False
        left = room.free - program.tokens
        if left < 0:
            return False
        return room.growth * (room.target + room.rounds) <= left or self._batch_gains(program, room, left)

    def _batch_gains(self, program: Program, room: Room, left: float) -> bool:
        """Return True if a larger batch is worth what the others lose and the program's own prefill."""
        if not room.window.mature or not room.running:
            return False
        before = self._throughput(len(room.running), room.context)
        after = self._throughput(len(room.running) + 1, room.context + program.context)
        gain_s = room.decode_s * max(0.0, after / before - 1.0)
        loss_s = 0.0
        if room.growth > 0:
            kept = min(room.rounds, room.free / room.growth)
            keeps = min(room.rounds, max(0.0, left - room.growth * room.target) / room.growth)
            if kept > 0 and keeps <= 0:
                return False
            if room.protected and keeps > 0:
                loss_s = max(0.0, kept - keeps) / keeps * room.impact_s
        return gain_s >= loss_s + self._impact_s(max(0, program.context - program.shared))

    def _throughput(self, sequences: int, tokens: int) -> float:
        return sequences / self._timing.decode_s(sequences, tokens)

    def _find_elsewhere(self, program: Program, now: float) -> SimEndpoint | None:
        """Return another endpoint for a program that has waited at its own one."""
        source = program.home
        mature = self._window(source).mature and now - program.queued_at >= TICK_S
        if program.paused is Paused.NEW or not mature:
            return None
        room = self._room(source)
        if not self._waiting_in_engine.get(source.index, 0) and room.queued < 2:  # itself
            return None
        wanted = max(0.0, room.free) + HEADROOM * program.context
        fits = [
            one
            for one in self._endpoints
            if one is not source and self._takes_over(self._room(one), wanted) and self._admits(program, one, now)
        ]
        return max(fits, key=lambda one: self._room(one).free, default=None)

    def _takes_over(self, room: Room, tokens: float) -> bool:
        return room.window.mature and not room.queued and room.free >= tokens

    def _force_after_s(self, program: Program) -> float:
        """Return how long a program waits at most, by the requests that are before it and how fast they go."""
        windows = [self._window(one) for one in self._endpoints]
        if any(not window.mature or window.throughput <= 0 for window in windows):
            return FORCE_AFTER_S
        throughput = sum(window.throughput for window in windows)
        ahead = 0.0
        for each in self._programs.values():
            rounds = self._window(each.home).target_rounds
            if each.active:
                ahead += max(float(not each.acting), rounds - each.rounds)
            elif each.waiting and each is not program and (each.ended_at or 0.0) > (program.ended_at or 0.0):
                ahead += max(1.0, rounds)
        return min(FORCE_AFTER_S, max(FORCE_NOT_BEFORE_S, 3.0 * ahead / throughput))


def _utility(ttl_s: float, impact_s: float, mean: float, sigma: float) -> float:
    if ttl_s <= 0:
        return 0.0
    comes = _normal((math.log(ttl_s) - mean) / sigma)
    idle_s = math.exp(mean + sigma * sigma / 2) * _normal((math.log(ttl_s) - mean - sigma * sigma) / sigma)
    return impact_s * comes - idle_s - ttl_s * (1.0 - comes)


def _normal(value: float) -> float:
    return 0.5 * (1.0 + math.erf(value / math.sqrt(2.0)))


def _mean(values: Sequence[float] | deque[int] | deque[float]) -> float:
    return fmean(values) if values else 0.0


def _capacity_tokens(endpoint: SimEndpoint) -> int:
    settings = endpoint.engine.settings
    return settings.capacity_blocks * settings.block_size
