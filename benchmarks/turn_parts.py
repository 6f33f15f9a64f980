"""Cost of each part of a warm turn: the same requests with one part after the other left out, in pairs.

`python -m benchmarks.turn_parts [--rounds N] [--out FOLDER]`

No sockets and no second thread: clients and engines are transports in memory, around the listener's own protocol and
the whole proxy. Every variant is a process of its own on one core, and all take turns, with slices short enough for the
least of many to be undisturbed. About two minutes."""

from __future__ import annotations

import argparse
import asyncio
import gc
import io
import itertools
import json
import math
import multiprocessing
import os
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvicorn
import uvloop
from uvicorn.server import ServerState

from benchmarks.report import machine
from kvproxy.app import Proxy
from kvproxy.base.resilience.breaker import Permit
from kvproxy.cache.feedback.predictions import PredictionFeedback
from kvproxy.cache.indexes.endpoint_lru import SpeculativeEntry
from kvproxy.cache.overlap import prompt_hashes as indexes
from kvproxy.cache.overlap.local_indexes import LocalIndexes
from kvproxy.cache.overlap.prompt_hashes import PromptHashes
from kvproxy.cache.overlap.sources import OverlapSources
from kvproxy.cache.prefix.session_hashes import SessionHashes
from kvproxy.cluster.routing.kv_aware import KvAware
from kvproxy.cluster.routing.policy import Choice, OverlapFacts
from kvproxy.cluster.routing.speeds import SpeedModel
from kvproxy.features.autoscaling.scaling import Autoscaling
from kvproxy.features.hygiene.prefix_breaks import PrefixBreaks
from kvproxy.operate.commands.logging_setup import log_to
from kvproxy.operate.config.load import load_config
from kvproxy.operate.runtime.recent import RecentDecisions
from kvproxy.proxy.forward import relay
from kvproxy.proxy.forward.body_guard import BodySanitizer
from kvproxy.proxy.forward.headers import RequestHeaders
from kvproxy.proxy.forward.metrics import RouteMetrics
from kvproxy.proxy.listener.parser import ListenerLimits
from kvproxy.proxy.listener.protocol import ClientProtocol

NOTES = Path(__file__).with_name("turn_parts_notes.md")
CHAIN = ("request_id", "access_log", "inference_request", "kvcache", "router")
CLIENTS, REQUESTS, WARM = 8, 96, 600
SESSIONS, TURNS = 16, 6  # of conversations at a time, and of each
SYSTEM = "You are the assistant of a company that makes tables, chairs and beds. " * 25
_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)

_EVENT = b'data: {"id":"c","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":" tok"}}]}\n\n'
_USAGE = b'"usage":{"prompt_tokens":%d,"completion_tokens":6,"prompt_tokens_details":{"cached_tokens":%d}}}'
_ANSWER = b'{"id":"c","object":"chat.completion","model":"bench","choices":[{"index":0,"message":{"content":"hi"}}],'


@dataclass(frozen=True)
class Load:
    """One kind of request."""

    name: str
    bytes_a_prompt: int  # of a chat on average
    tokens: int  # of its prompt, by the engine, which reuses nearly all
    chat: bool = False  # streamed turns of conversations that grow

    def request(self, number: int) -> bytes:
        """As a client sends it; its end is its own."""
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: proxy\r\ncontent-type: application/json\r\n"
        body: dict[str, Any] = {"model": "bench"}
        if self.chat:  # the next turn of one of several conversations
            turn, session = number // SESSIONS % TURNS, number // (SESSIONS * TURNS) * SESSIONS + number % SESSIONS
            contents = [f"message {n} of session {session}: " * 30 for n in range(2 * turn + 1)]
            body |= {"stream": True, "stream_options": {"include_usage": True}}
            head += f"x-session-id: s{session}\r\n"
        else:
            contents = [("lorem ipsum dolor " * self.bytes_a_prompt)[: self.bytes_a_prompt] + f"{number:016d}"]
        roles = itertools.cycle(("user", "assistant"))
        system = [{"role": "system", "content": SYSTEM}] if self.chat else []
        said = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]
        data = json.dumps(body | {"messages": system + said})
        return f"{head}content-length: {len(data)}\r\n\r\n{data}".encode()

    def answer(self) -> Sequence[bytes]:
        """Return the engine's answer, piece by piece."""
        usage = _USAGE % (self.tokens, self.tokens - 20)
        if not self.chat:
            body = _ANSWER + usage
            return [
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body
            ]
        last = b'data: {"id":"c","choices":[],' + usage + b"\n\n"
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        pieces = [b"%x\r\n%b\r\n" % (len(one), one) for one in (*[_EVENT] * 6, last, b"data: [DONE]\n\n")]
        return [head, *pieces[:-1], pieces[-1] + b"0\r\n\r\n"]


LOADS = (Load("2 KB", 2_048, 500), Load("chats, 2 to 12 messages, streamed", 7_000, 1_700, chat=True))


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _constant(owner: Any, name: str) -> Callable[..., Any]:
    """Return the method with its first result cached."""
    method, kept = getattr(owner, name), list[Any]()

    def answer(*args: Any, **kwargs: Any) -> Any:
        if not kept:
            kept.append(method(*args, **kwargs))
        return kept[0]

    return answer


def _no_match(_: OverlapSources, facts: Any) -> None:
    facts.overlaps = OverlapFacts(500)


def _unrouted(_: LocalIndexes, endpoint: Any, cursor: Any) -> SpeculativeEntry:
    return SpeculativeEntry(endpoint, cursor, 0, 0, None)


_turns = itertools.cycle((Choice(0, "load"), Choice(1, "load")))


@dataclass(frozen=True)
class Part:
    """Part of a turn, and how it is left out: filters, or methods with their replacements."""

    name: str
    what: str = ""
    policy: str = "kv_aware"
    chain: Sequence[str] = CHAIN
    facts: bool = True
    stubs: Sequence[tuple[Any, str, Callable[..., Any]]] = ()


def _without(*filters: str) -> Sequence[str]:
    return [one for one in CHAIN if one not in filters]


WHOLE = Part("everything")
ROUND_ROBIN = Part("all that only kv_aware does", "`round_robin`, and no facts", policy="round_robin")
PARTS = (
    ROUND_ROBIN,
    Part("facts, insertion, feedback", "the `kvcache` filter", facts=False),
    Part("- a prompt's name", "block hashes, of the bytes that name it",
         stubs=[(PromptHashes, "hash_prompt", _constant(PromptHashes, "hash_prompt"))]),
    Part("- - of that, identity", "what engines read alike, by message",
         stubs=[(indexes, "prompt_identity", lambda kind, prompt, drops_header: prompt),
                (SessionHashes, "identified", _constant(SessionHashes, "identified"))]),
    Part("- match", "both indexes, merged; heat; facts", stubs=[(OverlapSources, "_assess", _no_match)]),
    Part("- insertion", "at the placement, confirmed at the end",
         stubs=[(LocalIndexes, "route", _unrouted), (LocalIndexes, "settle_entry", _nothing)]),
    Part("- feedback", "predicted against reused: trust, capacity, ratios",
         stubs=[(PredictionFeedback, "_compare", _nothing)]),
    Part("- hygiene", "what broke a returning session's prefix", stubs=[(PrefixBreaks, "learned", _nothing)]),
    Part("decision", "the cost of each endpoint", stubs=[(KvAware, "choose", lambda *_: next(_turns))]),
    Part("what a placement teaches", "utilisation, arrivals", stubs=[(KvAware, "placed", _nothing)]),
    Part("learned speeds", "from first tokens", stubs=[(SpeedModel, "observe", _nothing)]),
    Part("demand for autoscaling", stubs=[(Autoscaling, "placed", _nothing)]),
    Part("verdict on the attempt", "breaker, health", stubs=[(Permit, "record_success", _nothing)]),
    Part("usage", "read from the answer", stubs=[(relay, "read_end", _nothing)]),
    Part("metrics of the request", stubs=[(RouteMetrics, "finished", _nothing)]),
    Part("record for the live page", stubs=[(RecentDecisions, "finished", _nothing)]),
    Part("access log", chain=_without("access_log")),
    Part("request id", chain=_without("request_id")),
    Part("fields for the engine", "forwarded, via, trace parent, no hop-by-hop",
         stubs=[(RequestHeaders, "build_head", _constant(RequestHeaders, "build_head"))]),
    Part("body guard", "fields that are no client's business", stubs=[(BodySanitizer, "passes", lambda *_: True)]),
    Part("body read and parsed", "and without it no facts: `least_request`", policy="least_request",
         chain=_without("inference_request", "kvcache")),
)  # fmt: skip


TEXT = """`kv_aware`, the default chain, two endpoints, no sockets: CPU of a turn, and what is saved where a part is
left out, in us, each the least of all rounds. A part that others build on takes some of theirs along, so that the rows
do not add up to the whole.
"""


class Pipe(asyncio.Transport):
    """The proxy's end of a connection in memory: what it writes goes to `on_data` at once."""

    def __init__(self, protocol: asyncio.BaseProtocol, on_data: Callable[[bytes], None]) -> None:
        super().__init__({"sockname": ("127.0.0.1", 80), "peername": ("127.0.0.1", 4000)})
        self.write = on_data  # type: ignore[method-assign, assignment]
        self.writelines = lambda pieces: on_data(b"".join(pieces))  # type: ignore[method-assign, assignment]
        self._protocol: Any = protocol
        self._closing = False

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            asyncio.get_running_loop().call_soon(self._protocol.connection_lost, None)

    def can_write_eof(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    pause_reading = resume_reading = _nothing
    abort = close


class Loop(uvloop.Loop):
    """Loop whose connections lead to an engine that answers each whole request, a piece in each turn of the loop."""

    answer: Sequence[bytes] = ()

    async def create_connection(self, factory: Callable[[], Any], *_: Any, **__: Any) -> Any:  # type: ignore[override]
        protocol, left = factory(), 0

        def on_data(data: bytes) -> None:
            nonlocal left
            if not left:
                length = _LENGTH.search(data)
                left = data.index(b"\r\n\r\n") + 4 + (int(length[1]) if length else 0)
            left -= len(data)
            if not left:
                self.call_soon(send, 0)

        def send(at: int) -> None:
            protocol.data_received(self.answer[at])
            if at + 1 < len(self.answer):
                self.call_soon(send, at + 1)

        transport = Pipe(protocol, on_data)
        protocol.connection_made(transport)
        return transport, protocol


class Clients:
    """Connections of clients to a proxy; each sends its next request when it has the answer to the last."""

    def __init__(self, proxy: Proxy, load: Load, count: int = CLIENTS) -> None:
        self._loop = asyncio.get_running_loop()
        self._load = load
        self._numbers = itertools.count()
        self._waiting: list[bytes] = []
        self._running = 0
        self._done = asyncio.Event()
        self._config = uvicorn.Config(proxy, log_config=None, lifespan="off", loop="none", proxy_headers=False)
        self._config.load()
        self._all = [self._connected() for _ in range(count)]

    def _connected(self) -> ClientProtocol:
        protocol = ClientProtocol(self._config, ServerState(), {}, limits=ListenerLimits(), on_refused=_nothing)
        end = b"0\r\n\r\n" if self._load.chat else b"}"

        def on_data(data: bytes) -> None:
            if data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(data.decode())
            if data.endswith(end):
                self._loop.call_soon(self._go_on, protocol)

        protocol.connection_made(Pipe(protocol, on_data))
        return protocol

    def _go_on(self, client: ClientProtocol) -> None:
        if self._waiting:
            client.data_received(self._waiting.pop())
            return
        self._running -= 1
        if not self._running:
            self._done.set()

    async def run(self, requests: int) -> float:
        """CPU microseconds of a request, over so many."""
        made = [self._load.request(next(self._numbers)) for _ in range(requests)]
        self._waiting = made[::-1]  # the first is taken off the end: a conversation grows
        self._running = len(self._all)
        self._done.clear()
        gc.collect()
        began = time.thread_time_ns()
        for client in self._all:
            self._go_on(client)
        await self._done.wait()
        return (time.thread_time_ns() - began) / requests / 1000


async def _serve(part: Part, load: Load, parent: Connection) -> None:
    """Run the child: each message is answered with the cost of a request, until the parent is gone."""
    endpoints = {"a": "http://127.0.0.1:9", "b": "http://127.0.0.1:10"}
    facts = {"engine_metrics_interval": 0, "enabled": part.facts}
    filters = [{"kvcache": facts} if one == "kvcache" else one for one in part.chain]
    raw = {"endpoints": endpoints, "policy": part.policy, "health": {"active": False}, "filters": filters}
    config, loop = load_config(raw), asyncio.get_running_loop()
    with log_to(config.log, stream=io.StringIO()):
        async with Proxy(config) as proxy:
            clients = Clients(proxy, load)
            await clients.run(WARM)
            gc.freeze()
            for owner, name, stub in part.stubs:
                setattr(owner, name, stub)
            while await loop.run_in_executor(None, parent.recv):
                parent.send(await clients.run(REQUESTS))


def _child(part: Part, load: Load, parent: Connection) -> None:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    Loop.answer = load.answer()
    with asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(_serve(part, load, parent))


def measure(load: Load, rounds: int) -> Mapping[str, float]:
    """Measure the least CPU microseconds per request of all rounds, by the part that was left out. That of everything
    is the median of several processes among the others: equal processes differ."""
    context = multiprocessing.get_context("fork")  # what all of them import is imported once
    variants = [WHOLE]
    for at, part in enumerate(PARTS, 1):
        variants += [part, WHOLE] if at % 7 == 0 else [part]
    children = []
    for part in variants:
        ours, theirs = context.Pipe()
        process = context.Process(target=_child, args=(part, load, theirs), daemon=True)
        process.start()
        children.append((process, ours))
    least = [math.inf] * len(variants)
    for number in range(rounds):
        order = range(len(variants))
        for at in order if number % 2 else reversed(order):
            children[at][1].send(True)
            least[at] = min(least[at], children[at][1].recv())
    for process, ours in children:
        ours.send(False)
        process.join()
    whole = statistics.median([us for part, us in zip(variants, least, strict=True) if part is WHOLE])
    return {part.name: us for part, us in zip(variants, least, strict=True)} | {WHOLE.name: whole}


def report(results: Mapping[str, Mapping[str, float]], about: Mapping[str, str]) -> str:
    """Render a row a part, a column a load."""
    lines = ["# The parts of a turn", "", *(f"- {name}: {value}" for name, value in about.items()), ""]
    lines.append(TEXT)
    lines += [f"| part | what it is | {' | '.join(results)} |", "|---|---" + "|---" * len(results) + "|"]
    whole = " | ".join(f"{found[WHOLE.name]:.0f}" for found in results.values())
    lines.append(f"| {WHOLE.name} | | {whole} |")
    for part in PARTS:
        saved = " | ".join(f"{found[WHOLE.name] - found[part.name]:.1f}" for found in results.values())
        lines.append(f"| {part.name} | {part.what} | {saved} |")
    return "\n".join(lines) + "\n" + (NOTES.read_text() if NOTES.exists() else "")


def main() -> None:
    """Measures and writes turn-parts.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    about = machine(os.cpu_count() or 1, f"python -m benchmarks.turn_parts --rounds {options.rounds}")
    text = report({load.name: measure(load, options.rounds) for load in LOADS}, about)
    print(text)
    if options.out:
        (options.out / "turn-parts.md").write_text(text)


if __name__ == "__main__":
    main()
