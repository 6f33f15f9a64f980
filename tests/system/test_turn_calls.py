"""Python calls that a turn of a conversation costs: each new hook, wrapper and property adds to them."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import random
import sys
from types import FrameType
from typing import Any

from benchmarks.turn_parts import CHAIN, Clients, Load, Loop
from benchmarks.turn_watcher import is_resumed
from kvproxy.app import Proxy
from kvproxy.cluster.routing.load import EngineState
from kvproxy.operate.commands.logging_setup import log_to
from kvproxy.operate.config.load import load_config

#: Of the package, in a streamed turn of a warm conversation; a coroutine that goes on counts as a call.
MOST_CALLS = 328
#: What sockets call, and the tasks of requests; a busy machine has more samplers and timers in a turn.
ENTERED = ("kvproxy.proxy.listener.", "kvproxy.base.upstream.")

TURNS = 6
WARM = 12 * TURNS
COUNTED = 12 * TURNS
WORDS = "the cache holds what the engine has computed before and the proxy knows it "
EVENT = b'data: {"id":"c","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":" tok"}}]}\n\n'
USAGE = b'"usage":{"prompt_tokens":%d,"completion_tokens":6,"prompt_tokens_details":{"cached_tokens":%d}}'
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"


class Talk(Load):
    """Conversations one after another, whose turns have up to 2 KB. An answer is a head, five tokens, and the rest."""

    def request(self, number: int) -> bytes:
        conversation, turn = divmod(number, TURNS)
        messages = [{"role": "system", "content": WORDS * 12}]
        for said, role in zip(range(2 * turn + 1), itertools.cycle(("user", "assistant")), strict=False):
            messages.append({"role": role, "content": f"{said} of {conversation}: {WORDS * 2}"})
        raw = {"model": "bench", "max_tokens": 6, "messages": messages, "stream": True}
        data = json.dumps(raw | {"stream_options": {"include_usage": True}}).encode()
        tokens = len(data) // 4
        last = b'data: {"id":"c","choices":[],' + USAGE % (tokens, tokens - 40) + b"}\n\ndata: [DONE]\n\n"
        Loop.answer = [HEAD, *[_chunk(EVENT)] * 5, _chunk(last) + b"0\r\n\r\n"]
        fields = b"host: proxy\r\ncontent-type: application/json\r\ncontent-length: %d" % len(data)
        return b"POST /v1/chat/completions HTTP/1.1\r\n" + fields + b"\r\n\r\n" + data


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Counter:
    """Calls of the package in the current thread."""

    def __init__(self) -> None:
        self.calls = self.resumed = 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and _module(frame).startswith("kvproxy.") and _entered(frame).startswith(ENTERED):
            self.calls += 1
            self.resumed += is_resumed(frame)


def _module(frame: FrameType) -> str:
    name: str = frame.f_globals.get("__name__", "")
    return name


def _entered(frame: FrameType) -> str:
    """Return the module of the package by which the event loop entered it."""
    found = ""
    at: FrameType | None = frame
    while at is not None:
        if _module(at).startswith("kvproxy."):
            found = _module(at)
        at = at.f_back
    return found


class Clock:
    """Seconds that go on with every reading."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        self.now += 0.0001
        return self.now


async def count_turns() -> dict[int, list[Counter]]:
    """Return the calls of each turn of some conversations, by its place in them."""
    clock = Clock()
    config = load_config(
        {
            "endpoints": {"a": "http://127.0.0.1:9", "b": "http://127.0.0.1:10"},
            "policy": "kv_aware",
            "health": {"active": False},
            "filters": [{"kvcache": {"engine_metrics_interval": 0}} if one == "kvcache" else one for one in CHAIN],
        }
    )
    counted: dict[int, list[Counter]] = {place: [] for place in range(TURNS)}
    with log_to(config.log, stream=io.StringIO()):
        async with Proxy(config, clock=clock, rng=random.Random(0)) as proxy:
            clients = Clients(proxy, Talk("turns", 2_000, 500, chat=True), count=1)
            for number in range(WARM + COUNTED):
                clock.now += 0.3
                for endpoint in proxy.clusters["default"].endpoints:
                    endpoint.load.engine = EngineState(clock.now, 100_000, 0, 0)
                counter = Counter()
                sys.setprofile(counter)
                try:
                    await clients.run(1)
                finally:
                    sys.setprofile(None)
                if number >= WARM:
                    counted[number % TURNS].append(counter)
    return counted


def test_a_streamed_turn_takes_few_calls() -> None:
    """The least of several: samples that are taken once a second come in some of them only."""
    with asyncio.Runner(loop_factory=Loop) as runner:
        counted = runner.run(count_turns())
    least = [min(counter.calls for counter in turns) for turns in counted.values()]
    assert max(least) <= MOST_CALLS, least
