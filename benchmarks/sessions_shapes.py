"""Batches of sessions for `benchmarks.sessions`, drawn from stated distributions or taken from the traces."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import count
from random import Random
from statistics import fmean

from benchmarks.routing_cells import ROOT
from kvproxy.lab.replay.trace import Trace, TraceSession, Turn, read_trace

BLOCK = 512
SYSTEM_BLOCKS = 16
#: All agents begin within so many seconds.
BEGIN_S = 20.0
#: Contexts of so many agents, as they are in the mean, fill an engine of 400,000 tokens.
AGENTS_AN_ENGINE = 16

Draw = Callable[[int, int], Trace]  # of so many sessions, with a seed


class _Blocks:
    """New block ids."""

    def __init__(self, first: int) -> None:
        self._ids = count(first)

    def grow(self, blocks: list[int], tokens: int) -> None:
        """Add new ones until the prompt of so many tokens has all of its whole blocks."""
        while len(blocks) < tokens // BLOCK:
            blocks.append(next(self._ids))


def _gap_s(rng: Random) -> float:
    """As in a coding trace: 86 % under a second, 95 % under ten, the rest up to a minute."""
    share = rng.random()
    if share < 0.86:
        return rng.uniform(0.1, 0.9)
    return rng.uniform(1.0, 10.0) if share < 0.95 else rng.uniform(10.0, 60.0)


def _turns(
    rng: Random, new: _Blocks, blocks: list[int], context: int, turns: int, gap_s: Callable[[], float]
) -> list[Turn]:
    """Draw an agent's turns: each adds a tool's result of 300 to 6,000 tokens and an answer of 100 to 600."""
    made = []
    for turn in range(turns):
        if turn:
            context += int(min(6_000, max(300, rng.lognormvariate(math.log(1_200), 0.7))))
        new.grow(blocks, context)
        answer = rng.randrange(100, 600)
        made.append(Turn(gap_s() if turn else 0.0, context, answer, array("Q", blocks)))
        context += answer
    made[-1] = replace(made[-1], calls_tool=False)
    return made


def _length(rng: Random) -> int:
    return max(6, min(70, int(rng.lognormvariate(math.log(22), 0.5))))


def draw_agents(sessions: int, seed: int, *, pauses: float = 0.0) -> Trace:
    """Agents with tools: a common system prompt of 8,192 tokens, a task of 2,000 to 6,000, 6 to 70 turns. Of the gaps
    a share of `pauses` is a human's, of one to five minutes."""
    rng = Random(seed)
    new = _Blocks(SYSTEM_BLOCKS)

    def gap_s() -> float:
        return rng.uniform(60.0, 300.0) if rng.random() < pauses else _gap_s(rng)

    made = []
    for _ in range(sessions):
        task = SYSTEM_BLOCKS * BLOCK + rng.randrange(2_000, 6_000)
        turns = _turns(rng, new, list(range(SYSTEM_BLOCKS)), task, _length(rng), gap_s)
        made.append(TraceSession(rng.uniform(0.0, BEGIN_S), tuple(turns), "agent"))
    return _trace("agents", made)


def draw_paused(sessions: int, seed: int) -> Trace:
    """Draw agents with a human who looks at every tenth answer."""
    return replace(draw_agents(sessions, seed, pauses=0.1), name="paused")


def draw_talks(sessions: int, seed: int) -> Trace:
    """Draw conversations as long as agents', with pauses of 5 to 25 s."""
    rng = Random(seed + 2)
    made = []
    for session in draw_agents(sessions, seed).sessions:
        first, *others = session.turns
        later = (replace(turn, delay_s=rng.uniform(5.0, 25.0), calls_tool=False) for turn in others)
        made.append(replace(session, turns=(replace(first, calls_tool=False), *later)))
    return _trace("talks", made)


def draw_forks(sessions: int, seed: int) -> Trace:
    """Every second agent goes on from the middle of another one's context, with its blocks up to there: a fork, or a
    sub-agent that was given its parent's context."""
    rng = Random(seed)
    parents = draw_agents(math.ceil(sessions / 2), seed).sessions
    new = _Blocks(10_000_000)
    made = list(parents)
    for parent in parents[: sessions // 2]:
        middle = parent.turns[len(parent.turns) // 2]
        context = middle.prompt_tokens + 200
        turns = _turns(rng, new, list(middle.blocks), context, max(3, _length(rng) // 2), lambda: _gap_s(rng))
        made.append(TraceSession(parent.start_s + rng.uniform(20.0, 120.0), tuple(turns), "agent"))
    return _trace("forks", made)


def draw_giant(sessions: int, seed: int) -> Trace:
    """One session in sixteen has 200,000 tokens from its first turn on."""
    rng = Random(seed)
    new = _Blocks(20_000_000)
    made = []
    for number, session in enumerate(draw_agents(sessions, seed).sessions):
        if number % AGENTS_AN_ENGINE == 3:
            turns = _turns(rng, new, list(range(SYSTEM_BLOCKS)), 200_000, 12, lambda: _gap_s(rng))
            session = replace(session, turns=tuple(turns))
        made.append(session)
    return _trace("giant", made)


def draw_mixed(sessions: int, seed: int) -> Trace:
    """Agents and as many requests of chats: people who write every 20 to 90 s, 8 times, with contexts of 1,000 to
    6,000 tokens; they begin all the time."""
    rng = Random(seed + 1)
    agents = draw_agents(sessions, seed)
    new = _Blocks(30_000_000)
    chats = []
    for _ in range(agents.requests // 8):
        blocks: list[int] = []
        context = rng.randrange(200, 3_000)
        turns = []
        for turn in range(8):
            new.grow(blocks, context)
            answer = rng.randrange(50, 500)
            delay_s = rng.uniform(20.0, 90.0) if turn else 0.0
            turns.append(Turn(delay_s, context, answer, array("Q", blocks), calls_tool=False))
            context += answer + rng.randrange(20, 200)
        chats.append(TraceSession(rng.uniform(0.0, 600.0), tuple(turns), "chat"))
    return _trace("mixed", [*agents.sessions, *chats])


def take_batch(name: str, sessions: int, seed: int) -> Trace:
    """So many sessions of a trace, which all begin at once."""
    rng = Random(seed)
    trace = read_trace(ROOT / "benchmarks" / "traces" / f"{name}.jsonl.gz")
    chosen = rng.sample(trace.sessions, min(sessions, len(trace.sessions)))
    made = [replace(each, start_s=rng.uniform(0.0, BEGIN_S), tenant="agent") for each in chosen]
    return replace(_trace(name, made), block_size=trace.block_size)


SHAPES: Mapping[str, Draw] = {
    "agents": draw_agents,
    "mixed": draw_mixed,
    "paused": draw_paused,
    "talks": draw_talks,
    "forks": draw_forks,
    "giant": draw_giant,
    "cc": lambda sessions, seed: take_batch("cc_dev", sessions, seed),
    "agent": lambda sessions, seed: take_batch("agent_dev", sessions, seed),
}


def needed_tokens(trace: Trace) -> float:
    """Return the memory that the agents' contexts need at once: for each session the mean of its own, and once what
    several share."""
    owners: dict[int, int] = {}
    shared: set[int] = set()
    agents = [each for each in trace.sessions if each.tenant == "agent"]
    for number, session in enumerate(agents):
        for block in session.turns[-1].blocks:
            if owners.setdefault(block, number) != number:
                shared.add(block)
    own = [fmean(_own(session, shared)) for session in agents]
    return trace.block_size * (sum(own) + len(shared))


def _own(session: TraceSession, shared: set[int]) -> Iterator[int]:
    common = sum(block in shared for block in session.turns[-1].blocks)
    for turn in session.turns:
        yield max(0, len(turn.blocks) - common) + 1


def _trace(name: str, sessions: list[TraceSession]) -> Trace:
    ordered = sorted(sessions, key=lambda each: each.start_s)
    first = ordered[0].start_s
    return Trace(name, BLOCK, tuple(replace(each, start_s=each.start_s - first) for each in ordered))
