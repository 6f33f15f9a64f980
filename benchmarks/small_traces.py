"""Request traces made small enough to be played by programs as they are, to simulated engines.

A simulated token stands for several of the trace, so that prompts are short to send and to read, and simulated engines
are as many times slower: times keep their proportions.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.routing_cells import capacity_tokens_of, trace_of
from kvproxy.lab.replay.settings import make_prompt
from kvproxy.lab.replay.trace import Trace, TraceSession, Turn
from kvproxy.lab.served import serve_fleet
from kvproxy.lab.simulator.engine_io import EngineSettings
from kvproxy.lab.simulator.fleet import FleetSettings, clone_engines
from kvproxy.lab.simulator.timing import EngineTiming
from kvproxy.lab.simulator.tokenizer import list_output_words
from kvproxy.lab.simulator.vllm_settings import VllmSettings

ENGINES = 4
#: Words of prompts by those of a replay: each is one token of a simulated engine.
_TOKENS = list_output_words()
_WORDS: dict[str, str] = {}
BLOCK_TOKENS = 16
MODEL = "sim"


@dataclass(frozen=True)
class SmallTrace:
    """Report half of a trace, reduced. `times` multiplies its times, `prefill` the time of a prefilled token on top."""

    name: str
    token: int  # tokens of the trace for which one stands here
    times: float
    prefill: float = 1.0
    requests: int = 400
    turns: int = 8  # of a session
    starts: float = 1.0  # multiplies the times at which sessions start
    delays: float = 1.0
    longest_delay_s: float = 2.0

    def read(self) -> Trace:
        """Return the trace, its times in seconds of the run."""
        whole = trace_of(self.name)
        trace = replace(whole, sessions=tuple(self._session(each) for each in whole.sessions)).cut(self.requests)
        return replace(trace, block_size=whole.block_size // self.token)

    def engine(self, *, kv_events: bool) -> EngineSettings:
        """Return one engine's settings."""
        usual = EngineTiming()
        timing = EngineTiming(
            prefill_tokens_per_s=usual.prefill_tokens_per_s / self.token / self.prefill,
            quadratic_tokens=usual.quadratic_tokens / self.token,
            decode_step_s=usual.decode_step_s * self.token,
            decode_sequence_s=usual.decode_sequence_s * self.token,
            decode_resident_block_s=usual.decode_resident_block_s * self.token**2,
            time_scale=self.times,
        )
        return EngineSettings(
            capacity_blocks=capacity_tokens_of(self.name) // self.token // BLOCK_TOKENS,
            block_size=BLOCK_TOKENS,
            max_batched_tokens=2048 // self.token + 64,
            max_sequences=256 // self.token,
            timing=timing,
            token_outputs=True,
            kv_events=kv_events,
        )

    def _session(self, session: TraceSession) -> TraceSession:
        turns = tuple(self._turn(turn) for turn in session.turns[: self.turns])
        return replace(session, start_s=session.start_s * self.starts * self.times, turns=turns)

    def _turn(self, turn: Turn) -> Turn:
        return Turn(
            min(turn.delay_s * self.delays * self.times, self.longest_delay_s),
            max(1, turn.prompt_tokens // self.token),
            max(1, turn.output_tokens // self.token),
            array("Q", turn.blocks),
        )


TRACES = {
    "agents": SmallTrace("agent_dev", token=8, times=1.0, prefill=8.0, requests=400, starts=0.1, delays=0.1),
    "chats": SmallTrace("conv_dev", token=8, times=0.2, starts=1.1),
}


@dataclass
class Ask:
    """A request to send, and what became of it."""

    prompt: str
    output_tokens: int
    session: str
    began: float = 0.0
    first_token_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    failed: str = ""

    def first_token(self) -> None:
        """Record the first piece of its answer."""
        if not self.first_token_s:
            self.first_token_s = time.perf_counter() - self.began

    def read_usage(self, usage: Mapping[str, Any]) -> None:
        """Record the answer's usage."""
        self.prompt_tokens = usage["prompt_tokens"]
        self.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


@contextlib.asynccontextmanager
async def serve_engines(small: SmallTrace) -> AsyncIterator[dict[str, str]]:
    """Serve the trace's engines in this event loop; yields `{id: url}`."""
    engine = VllmSettings(model=MODEL, engine=small.engine(kv_events=False))
    settings = FleetSettings(clone_engines(engine, ENGINES), controller=None)
    async with serve_fleet(settings, rng=random.Random(1)) as fleet:
        yield fleet.engines


def write_prompt(turn: Turn, block_tokens: int) -> str:
    """Return a prompt of as many tokens as the turn has."""
    words = make_prompt(turn, block_tokens).split()
    for word in words:
        if word not in _WORDS:
            _WORDS[word] = _TOKENS[len(_WORDS)]
    return "".join(_WORDS[word] for word in words)


async def play(trace: Trace, send: Callable[[Ask], Awaitable[None]]) -> list[Ask]:
    """Play every session: a turn follows the end of the one before it."""
    asked: list[Ask] = []

    async def session(number: int, start_s: float, turns: Sequence[Turn]) -> None:
        await asyncio.sleep(start_s)
        for turn in turns:
            await asyncio.sleep(turn.delay_s)
            ask = Ask(write_prompt(turn, trace.block_size), turn.output_tokens, f"session-{number}")
            asked.append(ask)
            ask.began = time.perf_counter()
            try:
                await send(ask)
            except Exception as error:
                ask.failed = type(error).__name__

    async with asyncio.TaskGroup() as tasks:
        for number, each in enumerate(trace.sessions):
            tasks.create_task(session(number, each.start_s, each.turns), name=f"session {number}")
    return asked


def summarize(asked: Sequence[Ask]) -> dict[str, float]:
    """Mean and 90th percentile of the time to first token, in seconds, share of prompt tokens cached, and failures."""
    answered = [ask for ask in asked if not ask.failed]
    times = sorted(ask.first_token_s for ask in answered)
    tokens = sum(ask.prompt_tokens for ask in answered)
    return {
        "requests": len(asked),
        "failed": len(asked) - len(answered),
        "ttft_s": statistics.fmean(times) if times else 0.0,
        "ttft_p90_s": times[len(times) * 9 // 10] if times else 0.0,
        "hits": sum(ask.cached_tokens for ask in answered) / tokens if tokens else 0.0,
    }
