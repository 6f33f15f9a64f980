"""Scenarios by name: a workload drawn from stated distributions, its load, and faults of the fleet or of the index.

The same seed draws the same. Times are in units that a replay's pace stretches, so that what happens within a run (a
burst, a flip) is given in shares of it. Lengths are tokens."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, count
from random import Random
from typing import TypeVar

from kvproxy.base.errors import KvproxyError
from kvproxy.lab.replay.settings import ReplayFleet
from kvproxy.lab.replay.trace import Half, Trace, TraceSession, Turn
from kvproxy.operate.config.decode import spelling_hint

_SPAN_S = 600.0  # of every open-loop workload before it is paced

#: Seeds of a workload: constants tuned on one draw are reported on another.
_SEEDS = {Half.TUNING: 2, Half.REPORT: 1, Half.BOTH: 1}


class UnknownScenario(KvproxyError):
    """No scenario of this name."""


class Draw:
    """Lengths, and blocks with names of their own, for one workload."""

    def __init__(self, rng: Random, block_size: int) -> None:
        self.rng = rng
        self.block_size = block_size
        self._names = count(1)

    def around(self, median: float, spread: float, most: float) -> int:
        """Lognormal: two thirds lie within a factor of e^spread."""
        return round(min(most, max(1.0, self.rng.lognormvariate(math.log(median), spread))))

    def exponential(self, mean: float, most: float) -> int:
        """With a long tail, cut off."""
        return round(min(most, max(1.0, self.rng.expovariate(1.0 / mean))))

    def start(self, begin: float = 0.0, end: float = _SPAN_S) -> float:
        """Return a time of the run."""
        return self.rng.uniform(begin, end)

    def blocks(self, tokens: int) -> list[int]:
        """Of text that nothing else has."""
        return [next(self._names) for _ in range(tokens // self.block_size)]

    def turn(self, prefix: list[int], new_tokens: int, output_tokens: int, *, delay_s: float = 0.0) -> Turn:
        """Return a prompt that begins with the blocks of `prefix` and goes on with text of its own."""
        names = [*prefix, *self.blocks(new_tokens)]
        return Turn(delay_s, len(prefix) * self.block_size + max(1, new_tokens), output_tokens, array("Q", names))

    def alone(
        self, requests: int, new_tokens: Callable[[], int], output_tokens: Callable[[], int]
    ) -> Iterator[TraceSession]:
        """Yield requests that share nothing."""
        for _ in range(requests):
            turn = self.turn([], new_tokens(), output_tokens())
            yield single(self.start(), turn)

    def chat(
        self,
        start_s: float,
        system: list[int],
        tenant: str = "",
        *,
        answer_tokens: float = 200,
        turns_mean: float = 3.5,
    ) -> TraceSession:
        """Turn of a median of 60 tokens (spread 1.1), answers of `answer_tokens` (0.8), one to many turns, a mean of
        12 s between an answer and what the user writes next."""
        turns = []
        history = system
        rest = 0
        delay_s = 0.0
        while True:
            asked = self.around(60, 1.1, 2000)
            answered = self.around(answer_tokens, 0.8, 1000)
            turn = self.turn(history, rest + asked, answered, delay_s=delay_s)
            turns.append(turn)
            if self.rng.random() < 1 / turns_mean:
                return TraceSession(start_s, tuple(turns), tenant)
            said = turn.prompt_tokens + answered
            history = [*turn.blocks, *self.blocks(said - len(turn.blocks) * self.block_size)]
            rest = said - len(history) * self.block_size
            delay_s = self.rng.expovariate(1 / 12)


def single(start_s: float, turn: Turn, tenant: str = "") -> TraceSession:
    return TraceSession(start_s, (turn,), tenant)


Workload = Callable[[Draw], Iterable[TraceSession]]
AnyWorkload = TypeVar("AnyWorkload", bound=Workload)
Disturb = Callable[[ReplayFleet], ReplayFleet]


@dataclass(frozen=True, slots=True)
class Scenario:
    """Where what is wrong with the fleet is the point, `any_trace` is true: a trace can take the workload's place."""

    name: str
    what: str
    load: float
    workload: Workload
    block_size: int
    disturb: Disturb = lambda fleet: fleet
    any_trace: bool = False

    def draw(self, half: Half) -> Trace:
        """Return the workload, of one seed for either half: sessions in order of their starts, the first at 0."""
        sessions = self.workload(Draw(Random(_SEEDS[half]), self.block_size))
        ordered = sorted(sessions, key=lambda session: session.start_s)
        first = ordered[0].start_s
        moved = tuple(replace(session, start_s=session.start_s - first) for session in ordered)
        return Trace(self.name, self.block_size, moved, half)


SCENARIOS: dict[str, Scenario] = {}


def find_scenarios(names: str) -> Sequence[Scenario]:
    """By their names, with commas between them."""
    wanted = [name.strip() for name in names.split(",")]
    for name in wanted:
        if name not in SCENARIOS:
            raise UnknownScenario(f"no scenario {name!r} ({spelling_hint(name, SCENARIOS)})")
    return [SCENARIOS[name] for name in wanted]


def list_scenarios() -> str:
    """Each with its load and what it is."""
    width = max(map(len, SCENARIOS))
    return "\n".join(f"{each.name:<{width}}  load {each.load:<4g}  {each.what}" for each in SCENARIOS.values())


def _scenario(
    name: str, load: float, what: str, *, block_size: int = 512, disturb: Disturb = lambda fleet: fleet
) -> Callable[[AnyWorkload], AnyWorkload]:
    """Make a workload a scenario; one may be several."""

    def add(workload: AnyWorkload) -> AnyWorkload:
        SCENARIOS[name] = Scenario(name, what, load, workload, block_size, disturb)
        return workload

    return add


def _quarter(fleet: ReplayFleet) -> ReplayFleet:
    return replace(fleet, capacity_tokens=fleet.capacity_tokens // 4)


@_scenario("herd", 0.85, "256 requests at once on one system prompt of 8k tokens")
def draw_herd(draw: Draw) -> Iterator[TraceSession]:
    """One system prompt of 8,192 tokens; 256 requests at once, then 2,000 at random times."""
    system = draw.blocks(8192)
    for at in [0.0] * 256 + [draw.start() for _ in range(2000)]:
        yield single(at, draw.turn(system, draw.rng.randint(100, 1000), draw.exponential(250, 2000)))


@_scenario("unique", 0.8, "prompts that share nothing")
def draw_unique(draw: Draw) -> Iterator[TraceSession]:
    """3,000 prompts of a median of 2,000 tokens (spread 1), none sharing anything."""
    return draw.alone(3000, lambda: draw.around(2000, 1.0, 60_000), lambda: draw.exponential(200, 1500))


@_scenario("bimodal", 0.7, "prompts of 100 tokens, one in twenty of 100k")
def draw_bimodal(draw: Draw) -> Iterator[TraceSession]:
    """2,500 prompts that share nothing: 100 tokens, and one in twenty 100,000; answers of about 100."""
    return draw.alone(2500, lambda: 100_000 if draw.rng.random() < 0.05 else 100, lambda: draw.exponential(100, 800))


@_scenario(
    "decode_memory",
    1.1,
    "the same with caches of 131k tokens: memory is full",
    block_size=64,
    disturb=lambda fleet: replace(fleet, capacity_tokens=131_072),
)
@_scenario("decode_bound", 0.85, "short prompts, long answers", block_size=64)
def draw_decodes(draw: Draw) -> Iterator[TraceSession]:
    """3,500 prompts of a median of 200 tokens (spread 0.8) that share nothing, answers of 800 on average."""
    return draw.alone(3500, lambda: draw.around(200, 0.8, 4000), lambda: draw.exponential(800, 4000))


@_scenario("chats", 0.9, "chats as in ShareGPT: short prompts, longer answers", block_size=16)
def draw_chats(draw: Draw) -> Iterator[TraceSession]:
    """2,200 chats as in ShareGPT: short questions, longer answers, a system prompt of 32 tokens."""
    system = draw.blocks(32)
    return (draw.chat(draw.start(), system) for _ in range(2200))


@_scenario(
    "short_chats",
    0.9,
    "chats of 760 tokens in and 310 out on engines with 64 decode slots",
    block_size=16,
    disturb=lambda fleet: replace(fleet, max_sequences=64),
)
def draw_short_chats(draw: Draw) -> Iterator[TraceSession]:
    """3,000 chats of two turns on average that decode long: about 760 tokens in and 310 out."""
    system = draw.blocks(32)
    return (draw.chat(draw.start(), system, answer_tokens=250, turns_mean=2.3) for _ in range(3000))


@_scenario("essays", 0.9, "short prompts, answers of 6,000 to 20,000 tokens", block_size=64)
def draw_essays(draw: Draw) -> Iterator[TraceSession]:
    """1,500 prompts of a median of 500 tokens (spread 0.8) that share nothing, answers of 6,000 to 20,000."""
    return draw.alone(1500, lambda: draw.around(500, 0.8, 4000), lambda: draw.rng.randint(6000, 20_000))


@_scenario("giants", 0.7, "prompts of 200k tokens among chats", block_size=64)
def draw_giants(draw: Draw) -> Iterator[TraceSession]:
    """1,000 chats, and 100 prompts of 200,000 tokens that share nothing."""
    system = draw.blocks(1024)
    for _ in range(1000):
        yield draw.chat(draw.start(), system)
    yield from draw.alone(100, lambda: 200_000, lambda: draw.exponential(200, 1000))


@_scenario("flash_crowd", 0.6, "600 questions on one document of 61k tokens within a tenth of the run")
def draw_flash_crowd(draw: Draw) -> Iterator[TraceSession]:
    """2,000 prompts of a median of 2,000 tokens (spread 1) that share nothing; from a third of the run on, for a tenth
    of it, 600 questions on one document of 61,440 tokens."""
    document = draw.blocks(61_440)
    begin = _SPAN_S / 3
    yield from draw.alone(2000, lambda: draw.around(2000, 1.0, 60_000), lambda: draw.exponential(200, 1500))
    for _ in range(600):
        question = draw.turn(document, draw.rng.randint(50, 500), draw.exponential(200, 1500))
        yield single(draw.start(begin, begin + _SPAN_S / 10), question)


@_scenario("hot_set", 0.85, "200 documents of 20k tokens, by Zipf's law")
def draw_hot_set(draw: Draw, *, flips: bool = False) -> Iterator[TraceSession]:
    """3,000 questions on 200 documents of 20,480 tokens (4 million together), by Zipf's law; with `flips` on 200 others
    from the middle of the run on."""
    sets = [[draw.blocks(20_480) for _ in range(200)] for _ in range(1 + flips)]
    weights = list(accumulate(1 / rank for rank in range(1, 201)))
    for _ in range(3000):
        at = draw.start()
        documents = sets[flips and at >= _SPAN_S / 2]
        document = draw.rng.choices(documents, cum_weights=weights)[0]
        yield single(at, draw.turn(document, draw.rng.randint(50, 500), draw.exponential(150, 1000)))


@_scenario("hot_set_flips", 0.85, "the same, other documents from half-way on")
def draw_hot_set_flips(draw: Draw) -> Iterator[TraceSession]:
    return draw_hot_set(draw, flips=True)


@_scenario("hot_prompt", 0.6, "half of the requests begin with the same 30k tokens")
def draw_hot_prompt(draw: Draw) -> Iterator[TraceSession]:
    """2,500 requests of which half begin with the same 30,720 tokens; the others share nothing."""
    hot = draw.blocks(30_720)
    for _ in range(2500):
        is_hot = draw.rng.random() < 0.5
        prefix, new = (hot, draw.around(200, 0.8, 2000)) if is_hot else ([], draw.around(800, 0.8, 16_000))
        yield single(draw.start(), draw.turn(prefix, new, draw.exponential(300, 2000)))


@_scenario("burst", 0.45, "ten times the chats for a thirtieth of the run", block_size=16)
def draw_burst(draw: Draw) -> Iterator[TraceSession]:
    """Chats that begin ten times as often during a thirtieth of the run, a third into it."""
    system = draw.blocks(32)
    begin = _SPAN_S / 3
    starts = [draw.start() for _ in range(1200)]
    starts += [draw.start(begin, begin + _SPAN_S / 30) for _ in range(9 * 1200 // 30)]
    return (draw.chat(at, system) for at in starts)


@_scenario("agents", 0.6, "agents with pauses of 5 to 60 s, a third of them fork")
def draw_agents(draw: Draw) -> Iterator[TraceSession]:
    """150 agents with one of four tool prompts of 4,096 tokens: about 15 turns of 2,000 tokens each, 5 to 60 s between
    them; a third of the agents fork, and two others go on from what they have by then."""
    tools = [draw.blocks(4096) for _ in range(4)]
    for _ in range(150):
        start_s = draw.start()
        turns = _agent_turns(draw, draw.rng.choice(tools), 2 + draw.exponential(13, 40))
        yield TraceSession(start_s, turns)
        if draw.rng.random() < 1 / 3:
            middle = len(turns) // 2
            reached_s = start_s + sum(turn.delay_s for turn in turns[:middle])
            for _ in range(2):
                branch = _agent_turns(draw, list(turns[middle].blocks), 1 + draw.exponential(5, 20))
                yield TraceSession(reached_s, branch)


def _agent_turns(draw: Draw, history: list[int], turns: int) -> tuple[Turn, ...]:
    found = []
    for number in range(turns):
        delay_s = draw.rng.uniform(5.0, 60.0) if number else 0.0
        turn = draw.turn(history, draw.around(2000, 0.7, 20_000), draw.exponential(250, 1500), delay_s=delay_s)
        found.append(turn)
        history = list(turn.blocks)
    return tuple(found)


@_scenario("greedy_tenant", 0.85, "a tenant sends 20k-token prompts beside others' chats", block_size=64)
def draw_greedy(draw: Draw) -> Iterator[TraceSession]:
    """900 chats of three tenants, and a fourth that sends 500 prompts of 20,000 tokens which share nothing."""
    system = draw.blocks(1024)
    for number in range(900):
        yield draw.chat(draw.start(), system, f"polite {number % 3}")
    for _ in range(500):
        yield single(draw.start(), draw.turn([], 20_000, draw.exponential(100, 500)), "greedy")


def draw_assistants(draw: Draw) -> list[TraceSession]:
    """3,000 requests to three assistants with tool prompts of 6,144, 2,560 and 1,024 tokens, half of them in chains of
    about four that each repeat the one before and add 2,000 tokens (spread 1)."""
    rng = draw.rng
    tools = [draw.blocks(tokens) for tokens in (6144, 2560, 1024)]
    sessions: list[TraceSession] = []
    while len(sessions) < 3000:
        at = draw.start()
        history = rng.choices(tools, (5, 3, 2))[0]
        for _ in range(draw.exponential(4, 12) if rng.random() < 0.2 else 1):
            turn = draw.turn(history, draw.around(2000, 1.0, 40_000), draw.exponential(150, 1000))
            sessions.append(single(min(at, _SPAN_S), turn))
            history = list(turn.blocks)
            at = at + rng.expovariate(1 / 20)
    return sessions


def _disturbed(name: str, load: float, what: str, disturb: Disturb) -> None:
    SCENARIOS[name] = Scenario(name, what, load, draw_assistants, 512, disturb, any_trace=True)


def _change(**changes: object) -> Disturb:
    return lambda fleet: replace(fleet, **changes)  # type: ignore[arg-type]


def _half_way(change: str) -> Disturb:
    """Of the last engine."""
    return lambda fleet: replace(fleet, **{change: ((fleet.instances - 1, 0.5),)})  # type: ignore[arg-type]


_disturbed("engine_added", 0.8, "the last engine comes half-way, cold", _half_way("joins"))
_disturbed("engine_removed", 0.75, "the last engine goes half-way", _half_way("leaves"))
_disturbed(
    "slow_half",
    0.55,
    "half of the engines have 0.4 of the speed",
    lambda fleet: replace(fleet, slowness=(2.5,) * (fleet.instances // 2)),
)
_disturbed("false_20", 0.7, "20 % of the index's entries are false", _change(wrong_share=0.2))
_disturbed("false_50", 0.7, "half of the index's entries are false", _change(wrong_share=0.5))
_disturbed("reports_nothing", 0.7, "engines report 0 cached tokens", _change(reports_cached=False))
_disturbed(
    "small_cache",
    0.5,
    "caches of an eighth",
    lambda fleet: replace(fleet, capacity_tokens=fleet.capacity_tokens // 8),
)
_disturbed("quarter_cache", 0.7, "a quarter of the cache, tools", _quarter)


@_scenario("quarter_chats", 0.7, "the same with long conversations", disturb=_quarter)
def draw_conversations(draw: Draw) -> Iterator[TraceSession]:
    """700 conversations of about four turns of 2,500 tokens (spread 0.8), answers of about 350, 30 s between turns."""
    for _ in range(700):
        turns = []
        history: list[int] = []
        for number in range(1 + draw.exponential(3, 15)):
            asked = draw.around(2500, 0.8, 30_000)
            answered = draw.exponential(350, 2000)
            delay_s = draw.rng.expovariate(1 / 30) if number else 0.0
            turn = draw.turn(history, asked, answered, delay_s=delay_s)
            turns.append(turn)
            history = [*turn.blocks, *draw.blocks(answered)]
        yield TraceSession(draw.start(), tuple(turns))
