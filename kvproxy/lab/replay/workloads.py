"""Synthetic workloads: traces drawn from stated distributions, the same for the same seed.

Times are in units that a replay's pace stretches, so that what happens within a run (a burst, a flip) is given in
shares of it. Lengths are tokens."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import accumulate, count
from random import Random

from kvproxy.lab.replay.trace import Trace, TraceSession, Turn

#: Draws a workload.
Workload = Callable[[Random], Trace]

_SPAN_S = 600.0  # of every open-loop workload before it is paced


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

    def blocks(self, tokens: int) -> list[int]:
        """Of text that nothing else has."""
        return [next(self._names) for _ in range(tokens // self.block_size)]

    def turn(self, prefix: list[int], new_tokens: int, output_tokens: int, *, delay_s: float = 0.0) -> Turn:
        """Return a prompt that begins with the blocks of `prefix` and goes on with text of its own."""
        names = [*prefix, *self.blocks(new_tokens)]
        return Turn(delay_s, len(prefix) * self.block_size + max(1, new_tokens), output_tokens, array("Q", names))

    def trace(self, name: str, sessions: Iterable[TraceSession]) -> Trace:
        """Sessions in order of their starts, the first at 0."""
        ordered = sorted(sessions, key=lambda session: session.start_s)
        first = ordered[0].start_s
        moved = (replace(session, start_s=session.start_s - first) for session in ordered)
        return Trace(name, self.block_size, tuple(moved))

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
    """Return a request of its own."""
    return TraceSession(start_s, (turn,), tenant)


def draw_herd(rng: Random) -> Trace:
    """One system prompt of 8,192 tokens; 256 requests at once, then 2,000 at random times."""
    draw = Draw(rng, 512)
    system = draw.blocks(8192)
    starts = [0.0] * 256 + [rng.uniform(0.0, _SPAN_S) for _ in range(2000)]
    return draw.trace(
        "herd", (single(at, draw.turn(system, rng.randint(100, 1000), draw.exponential(250, 2000))) for at in starts)
    )


def draw_unique(rng: Random) -> Trace:
    """3,000 prompts of a median of 2,000 tokens (spread 1), none sharing anything."""
    draw = Draw(rng, 512)
    turns = (draw.turn([], draw.around(2000, 1.0, 60_000), draw.exponential(200, 1500)) for _ in range(3000))
    return draw.trace("unique", (single(rng.uniform(0.0, _SPAN_S), turn) for turn in turns))


def draw_bimodal(rng: Random) -> Trace:
    """2,500 prompts that share nothing: 100 tokens, and one in twenty 100,000; answers of about 100."""
    draw = Draw(rng, 512)
    lengths = (100_000 if rng.random() < 0.05 else 100 for _ in range(2500))
    turns = (draw.turn([], length, draw.exponential(100, 800)) for length in lengths)
    return draw.trace("bimodal", (single(rng.uniform(0.0, _SPAN_S), turn) for turn in turns))


def draw_decodes(rng: Random) -> Trace:
    """3,500 prompts of a median of 200 tokens (spread 0.8) that share nothing, answers of 800 on average."""
    draw = Draw(rng, 64)
    turns = (draw.turn([], draw.around(200, 0.8, 4000), draw.exponential(800, 4000)) for _ in range(3500))
    return draw.trace("decodes", (single(rng.uniform(0.0, _SPAN_S), turn) for turn in turns))


def draw_chats(rng: Random) -> Trace:
    """2,200 chats as in ShareGPT: short questions, longer answers, a system prompt of 32 tokens."""
    draw = Draw(rng, 16)
    system = draw.blocks(32)
    return draw.trace("chats", (draw.chat(rng.uniform(0.0, _SPAN_S), system) for _ in range(2200)))


def draw_short_chats(rng: Random) -> Trace:
    """3,000 chats of two turns on average that decode long: about 760 tokens in and 310 out."""
    draw = Draw(rng, 16)
    system = draw.blocks(32)
    starts = (rng.uniform(0.0, _SPAN_S) for _ in range(3000))
    return draw.trace("short_chats", (draw.chat(at, system, answer_tokens=250, turns_mean=2.3) for at in starts))


def draw_giants(rng: Random) -> Trace:
    """1,000 chats, and 100 prompts of 200,000 tokens that share nothing."""
    draw = Draw(rng, 64)
    system = draw.blocks(1024)
    sessions = [draw.chat(rng.uniform(0.0, _SPAN_S), system) for _ in range(1000)]
    giants = (draw.turn([], 200_000, draw.exponential(200, 1000)) for _ in range(100))
    return draw.trace("giants", [*sessions, *(single(rng.uniform(0.0, _SPAN_S), turn) for turn in giants)])


def draw_essays(rng: Random) -> Trace:
    """1,500 prompts of a median of 500 tokens (spread 0.8) that share nothing, answers of 6,000 to 20,000."""
    draw = Draw(rng, 64)
    turns = (draw.turn([], draw.around(500, 0.8, 4000), rng.randint(6000, 20_000)) for _ in range(1500))
    return draw.trace("essays", (single(rng.uniform(0.0, _SPAN_S), turn) for turn in turns))


def draw_flash_crowd(rng: Random) -> Trace:
    """2,000 prompts of a median of 2,000 tokens (spread 1) that share nothing; from a third of the run on, for a tenth
    of it, 600 questions on one document of 61,440 tokens."""
    draw = Draw(rng, 512)
    document = draw.blocks(61_440)
    begin = _SPAN_S / 3
    turns = (draw.turn([], draw.around(2000, 1.0, 60_000), draw.exponential(200, 1500)) for _ in range(2000))
    sessions = [single(rng.uniform(0.0, _SPAN_S), turn) for turn in turns]
    for _ in range(600):
        question = draw.turn(document, rng.randint(50, 500), draw.exponential(200, 1500))
        sessions.append(single(rng.uniform(begin, begin + _SPAN_S / 10), question))
    return draw.trace("flash_crowd", sessions)


def draw_burst(rng: Random) -> Trace:
    """Chats that begin ten times as often during a thirtieth of the run, a third into it."""
    draw = Draw(rng, 16)
    system = draw.blocks(32)
    begin = _SPAN_S / 3
    length = _SPAN_S / 30
    starts = [rng.uniform(0.0, _SPAN_S) for _ in range(1200)]
    starts += [rng.uniform(begin, begin + length) for _ in range(9 * 1200 // 30)]
    return draw.trace("burst", (draw.chat(at, system) for at in starts))


def draw_hot_set(rng: Random, *, flips: bool = False) -> Trace:
    """3,000 questions on 200 documents of 20,480 tokens (4 million together), by Zipf's law; with `flips` on 200 others
    from the middle of the run on."""
    draw = Draw(rng, 512)
    sets = [[draw.blocks(20_480) for _ in range(200)] for _ in range(1 + flips)]
    weights = list(accumulate(1 / rank for rank in range(1, 201)))
    sessions = []
    for _ in range(3000):
        at = rng.uniform(0.0, _SPAN_S)
        documents = sets[flips and at >= _SPAN_S / 2]
        document = rng.choices(documents, cum_weights=weights)[0]
        sessions.append(single(at, draw.turn(document, rng.randint(50, 500), draw.exponential(150, 1000))))
    return draw.trace("hot_set_flips" if flips else "hot_set", sessions)


def draw_hot_prompt(rng: Random) -> Trace:
    """2,500 requests of which half begin with the same 30,720 tokens; the others share nothing."""
    draw = Draw(rng, 512)
    hot = draw.blocks(30_720)
    sessions = []
    for _ in range(2500):
        prefix, new = (hot, draw.around(200, 0.8, 2000)) if rng.random() < 0.5 else ([], draw.around(800, 0.8, 16_000))
        sessions.append(single(rng.uniform(0.0, _SPAN_S), draw.turn(prefix, new, draw.exponential(300, 2000))))
    return draw.trace("hot_prompt", sessions)


def draw_agents(rng: Random) -> Trace:
    """150 agents with one of four tool prompts of 4,096 tokens: about 15 turns of 2,000 tokens each, 5 to 60 s between
    them; a third of the agents fork, and two others go on from what they have by then."""
    draw = Draw(rng, 512)
    tools = [draw.blocks(4096) for _ in range(4)]
    sessions = []
    for _ in range(150):
        start_s = rng.uniform(0.0, _SPAN_S)
        turns = _agent_turns(draw, rng.choice(tools), 2 + draw.exponential(13, 40))
        sessions.append(TraceSession(start_s, turns))
        if rng.random() < 1 / 3:
            middle = len(turns) // 2
            reached_s = start_s + sum(turn.delay_s for turn in turns[:middle])
            for _ in range(2):
                branch = _agent_turns(draw, list(turns[middle].blocks), 1 + draw.exponential(5, 20))
                sessions.append(TraceSession(reached_s, branch))
    return draw.trace("agents", sessions)


def _agent_turns(draw: Draw, history: list[int], turns: int) -> tuple[Turn, ...]:
    found = []
    for number in range(turns):
        delay_s = draw.rng.uniform(5.0, 60.0) if number else 0.0
        turn = draw.turn(history, draw.around(2000, 0.7, 20_000), draw.exponential(250, 1500), delay_s=delay_s)
        found.append(turn)
        history = list(turn.blocks)
    return tuple(found)


def draw_greedy(rng: Random) -> Trace:
    """900 chats of three tenants, and a fourth that sends 500 prompts of 20,000 tokens which share nothing."""
    draw = Draw(rng, 64)
    system = draw.blocks(1024)
    sessions = [draw.chat(rng.uniform(0.0, _SPAN_S), system, f"polite {number % 3}") for number in range(900)]
    sessions += [
        single(rng.uniform(0.0, _SPAN_S), draw.turn([], 20_000, draw.exponential(100, 500)), "greedy")
        for _ in range(500)
    ]
    return draw.trace("greedy", sessions)


def draw_assistants(rng: Random) -> Trace:
    """3,000 requests to three assistants with tool prompts of 6,144, 2,560 and 1,024 tokens, half of them in chains of
    about four that each repeat the one before and add 2,000 tokens (spread 1)."""
    draw = Draw(rng, 512)
    tools = [draw.blocks(tokens) for tokens in (6144, 2560, 1024)]
    sessions: list[TraceSession] = []
    while len(sessions) < 3000:
        at = rng.uniform(0.0, _SPAN_S)
        history = rng.choices(tools, (5, 3, 2))[0]
        for _ in range(draw.exponential(4, 12) if rng.random() < 0.2 else 1):
            turn = draw.turn(history, draw.around(2000, 1.0, 40_000), draw.exponential(150, 1000))
            sessions.append(single(min(at, _SPAN_S), turn))
            history = list(turn.blocks)
            at = at + rng.expovariate(1 / 20)
    return draw.trace("assistants", sessions)


def draw_conversations(rng: Random) -> Trace:
    """700 conversations of about four turns of 2,500 tokens (spread 0.8), answers of about 350, 30 s between turns."""
    draw = Draw(rng, 512)
    sessions = []
    for _ in range(700):
        turns = []
        history: list[int] = []
        for number in range(1 + draw.exponential(3, 15)):
            asked = draw.around(2500, 0.8, 30_000)
            answered = draw.exponential(350, 2000)
            delay_s = rng.expovariate(1 / 30) if number else 0.0
            turn = draw.turn(history, asked, answered, delay_s=delay_s)
            turns.append(turn)
            history = [*turn.blocks, *draw.blocks(answered)]
        sessions.append(TraceSession(rng.uniform(0.0, _SPAN_S), tuple(turns)))
    return draw.trace("conversations", sessions)
