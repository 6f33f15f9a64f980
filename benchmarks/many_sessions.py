"""Thousands of agents' sessions at once, whose clients leave and whose engines die: is every request answered or
refused, is anything left over?

    python -m benchmarks.virtual benchmarks.many_sessions [--sessions 2048] [--waves 3] [--out FOLDER]

A whole proxy, simulated engines whose memory holds a quarter of the contexts, and clients, on loopback sockets and in
virtual time. No header names a session. A wave begins all of its sessions within a few seconds; one request in twenty
is left by its client, which sends it again. Every few seconds an engine's connections are cut, and it starts again
with an empty cache. Writes many_sessions.md.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import itertools
import json
import logging
import random
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from benchmarks import virtual
from benchmarks.markdown import table
from kvproxy.app import Proxy
from kvproxy.features.residents.cluster_sessions import ClusterSessions, find_sessions
from kvproxy.lab.simulator.engine_io import EngineSettings
from kvproxy.lab.simulator.fleet import Fleet, FleetSettings
from kvproxy.lab.simulator.vllm_settings import VllmSettings
from kvproxy.operate.config.load import load_config
from kvproxy.proxy.listener.server import Server

MODEL = "sim"
CHAT = "/v1/chat/completions"
ENGINES = 4
BLOCK = 16
#: A session begins with so many words, and each turn adds some; a word is a token.
SYSTEM_WORDS = 200
FIRST_WORDS = 400
TURN_WORDS = 150
ANSWER_TOKENS = 12
TURNS = (2, 4)
#: How much the contexts need over what the engines' memory holds.
RATIO = 4
BEGIN_S = 5.0
#: Share of the requests that are left by their clients, within so many seconds.
LEAVES = 0.05
LEAVES_S = 8.0
#: A dead engine is started again so much later; another one dies so long after that.
DEAD_S = 4.0
ALIVE_S = (6.0, 14.0)
#: Bound on a request's wait in the router queue.
MAX_WAIT_S = 60.0
#: A request that took longer hangs.
HUNG_S = MAX_WAIT_S + 60.0
#: A client that was refused comes again so often, each time as late as it was asked to.
TRIES = 40
#: Until nothing may be left over: sessions are forgotten after 30 s without a turn.
SETTLE_S = 60
WORDS = ("water", "word", "part", "place", "work", "year", "live", "where", "after", "back", "little", "round", "man")


class Recorder:
    """Counts the requests that an engine began and those that it answered whole, by their ids."""

    def __init__(self) -> None:
        self.began: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()

    def around(self, app: ASGIApp) -> ASGIApp:
        """Return an engine whose requests are counted."""

        async def record(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or scope["path"] != CHAT:
                await app(scope, receive, send)
                return
            request_id = dict(scope["headers"]).get(b"x-request-id", b"").decode()
            self.began[request_id] += 1

            async def sent(message: Message) -> None:
                if b"[DONE]" in message.get("body", b""):
                    self.ended[request_id] += 1
                await send(message)

            await app(scope, receive, sent)

        return record


class MortalEngine:
    """An engine that can die and start again on its port."""

    def __init__(self, capacity_tokens: int, recorder: Recorder, rng: random.Random) -> None:
        engine = EngineSettings(capacity_tokens // BLOCK, BLOCK, token_outputs=True)
        self._settings = FleetSettings({"e": VllmSettings(model=MODEL, engine=engine)}, controller=None)
        self._recorder = recorder
        self._rng = rng
        self._stack = contextlib.AsyncExitStack()
        self.port = 0

    async def start(self) -> None:
        """Serve with an empty cache."""
        fleet = await self._stack.enter_async_context(Fleet(self._settings, rng=self._rng))
        app = self._recorder.around(fleet.engines["e"])
        server = await self._stack.enter_async_context(Server(app, port=self.port, drain_s=0.0, cut_grace_s=0.0))
        self.port = server.port

    async def die(self) -> None:
        """Cut every connection."""
        await self._stack.aclose()


@dataclass
class Crowd:
    """A run and its results."""

    engines: list[MortalEngine]
    recorder: Recorder
    rng: random.Random
    port: int = 0  # of the proxy
    ended: Counter[str] = field(default_factory=Counter)
    sessions: Counter[str] = field(default_factory=Counter)
    longest_s: float = 0.0  # of any request, until its end
    deaths: int = 0
    waves: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Answer:
    """How a request ended."""

    ended: str
    retry_after_s: float = 0.0


async def ask(port: int, body: bytes, request_id: str) -> Answer:
    """Send one request on a connection of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = (
        f"POST {CHAT} HTTP/1.1\r\nhost: proxy\r\ncontent-type: application/json\r\nconnection: close\r\n"
        f"x-request-id: {request_id}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    try:
        writer.write(head.encode() + body)
        return judge(await reader.read(-1))
    finally:
        writer.close()


def judge(whole: bytes) -> Answer:
    """Return how a request ended, by all that came. A stream after comments carries its refusal in an event."""
    head, _, rest = whole.partition(b"\r\n\r\n")
    status = head[9:12].decode()
    code = rest.partition(b'"code":"')[2].partition(b'"')[0].decode()
    if status == "200" and b'"error"' not in rest:
        return Answer("answered" if rest.count(b"data: [DONE]") == 1 else "cut")
    if status == "200" and code != "queue_full":
        return Answer("cut with an error event")
    fields = dict(line.partition(b":")[::2] for line in head.lower().split(b"\r\n"))
    return Answer(f"refused {code}" if status else "no answer", float(fields.get(b"retry-after", b"1")))


class Session:
    """An agent: each prompt has all that came before."""

    def __init__(self, crowd: Crowd, number: int, *, system: str) -> None:
        self._crowd = crowd
        self._rng = random.Random(crowd.rng.random())
        self._number = number
        self._sent = itertools.count()
        self._messages = [{"role": "system", "content": system}, self._say(FIRST_WORDS)]

    async def run(self) -> None:
        """Begin within a few seconds and play every turn."""
        await asyncio.sleep(self._rng.uniform(0.0, BEGIN_S))
        for _ in range(self._rng.randint(*TURNS)):
            if not await self._play_turn():
                self._crowd.sessions["given up"] += 1
                return
            self._messages += [{"role": "assistant", "content": "done"}, self._say(TURN_WORDS)]
            await asyncio.sleep(self._rng.uniform(0.05, 0.5))
        self._crowd.sessions["ended"] += 1

    async def _play_turn(self) -> bool:
        """Ask until it is answered; False: not within all tries."""
        for _ in range(TRIES):
            answer = await self._ask(f"{self._number}-{next(self._sent)}")
            if answer.ended == "answered":
                return True
            if answer.retry_after_s:
                await asyncio.sleep(answer.retry_after_s * self._rng.uniform(1.0, 1.2))
        return False

    async def _ask(self, request_id: str) -> Answer:
        crowd = self._crowd
        body = {"model": MODEL, "messages": self._messages, "stream": True, "max_tokens": ANSWER_TOKENS}
        leaves = self._rng.random() < LEAVES
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._rng.uniform(0.0, LEAVES_S) if leaves else HUNG_S):
                answer = await ask(crowd.port, json.dumps(body).encode(), request_id)
        except TimeoutError:
            answer = Answer("left by its client" if leaves else "hung")
        except OSError as error:
            answer = Answer(type(error).__name__)
        crowd.ended[answer.ended] += 1
        crowd.longest_s = max(crowd.longest_s, time.monotonic() - began)
        return answer

    def _say(self, words: int) -> dict[str, str]:
        count = round(words * self._rng.uniform(0.5, 1.5))
        return {"role": "user", "content": " ".join(self._rng.choices(WORDS, k=count))}


async def disturb(crowd: Crowd) -> None:
    """Have one engine after another die and start again."""
    while True:
        await asyncio.sleep(crowd.rng.uniform(*ALIVE_S))
        engine = crowd.rng.choice(crowd.engines)
        await engine.die()
        crowd.deaths += 1
        await asyncio.sleep(DEAD_S)
        await engine.start()


def left_over(proxy: Proxy, sessions: ClusterSessions) -> Mapping[str, int]:
    """Return what still runs, waits or has a place."""
    cluster = proxy.clusters["default"]
    assert cluster.queue is not None
    shown = sessions.describe()
    counted = {name: shown[name] for name in ("known", "residents", "waiting")}
    counted["in flight"] = sum(one.load.in_flight for one in cluster.endpoints)
    counted["in the queue"] = len(cluster.queue)
    return {name: int(str(count)) for name, count in counted.items() if count}


async def watch(sessions: ClusterSessions, most: dict[str, int]) -> None:
    """Note the most residents and the most that wait."""
    while True:
        shown = sessions.describe()
        for name, count in most.items():
            most[name] = max(count, int(str(shown[name])))
        await asyncio.sleep(1.0)


async def play_wave(crowd: Crowd, proxy: Proxy, sessions: int) -> None:
    """Play a wave, and look at what is left when it is over."""
    rule = next(find_sessions(proxy.clusters.values()))
    began, cpu_began = time.monotonic(), time.process_time()
    system = " ".join(crowd.rng.choices(WORDS, k=SYSTEM_WORDS))
    first = len(crowd.waves) * sessions
    disturber = asyncio.create_task(disturb(crowd))
    most = {"residents": 0, "waiting": 0}
    watcher = asyncio.create_task(watch(rule, most))
    await asyncio.gather(*(Session(crowd, first + number, system=system).run() for number in range(sessions)))
    took_s = time.monotonic() - began
    for task in (disturber, watcher):
        task.cancel()
    await asyncio.gather(disturber, watcher, return_exceptions=True)
    for settled_s in range(SETTLE_S):  # noqa: B007 - of the last look
        if not (left := left_over(proxy, rule)):
            break
        await asyncio.sleep(1.0)
    gc.collect()
    crowd.waves.append(
        {
            "took s": round(took_s),
            "most residents": most["residents"],
            "most waiting": most["waiting"],
            "gave way so far": rule.rule.given_way,
            "settled after s": settled_s,
            "left over": ", ".join(f"{name} {count}" for name, count in left.items()) or "nothing",
            "MB": round(psutil.Process().memory_info().rss / 1e6),
            "objects": len(gc.get_objects()),
            "CPU s": round(time.process_time() - cpu_began),
        }
    )
    print(crowd.waves[-1], dict(crowd.ended), flush=True)


async def run(crowd: Crowd, sessions: int, waves: int, report: Path) -> None:
    """Play every wave through one proxy, and report after each."""
    for engine in crowd.engines:
        await engine.start()
    config = {
        "endpoints": {f"e{number}": f"http://127.0.0.1:{one.port}" for number, one in enumerate(crowd.engines)},
        "queue": {"enabled": "auto", "max_wait": f"{MAX_WAIT_S:.0f}s"},
    }
    async with Proxy(load_config(config)) as proxy, Server(proxy) as server:
        crowd.port = server.port
        await asyncio.sleep(10.0)  # until the engines' memory is read
        for _ in range(waves):
            await play_wave(crowd, proxy, sessions)
            report.write_text(as_markdown(crowd, sessions))  # noqa: ASYNC240 - nothing else runs
    for engine in crowd.engines:
        await engine.die()


def is_expected(ended: str) -> bool:
    """Return whether a request may end so. A stream that had begun on an engine that died is cut with an event."""
    return ended in ("answered", "left by its client", "cut with an error event") or ended.startswith("refused")


def as_markdown(crowd: Crowd, sessions: int) -> str:
    """Return the report."""
    unexpected = sum(count for ended, count in crowd.ended.items() if not is_expected(ended))
    twice = sum(count > 1 for count in crowd.recorder.ended.values())
    again = sum(count > 1 for count in crowd.recorder.began.values())
    waves = [[str(number), *map(str, one.values())] for number, one in enumerate(crowd.waves, 1)]
    return f"""# Many sessions

`python -m benchmarks.virtual benchmarks.many_sessions --sessions {sessions} --waves {len(crowd.waves)}`

Waves of {sessions} sessions at once, of {TURNS[0]} to {TURNS[1]} turns, without a name, through one proxy to {ENGINES}
simulated engines whose memory holds a quarter of their contexts; all of it in one process, on loopback sockets, in
virtual time. One request in twenty is left by its client; {crowd.deaths} times an engine's connections were cut and it
started again with an empty cache. `queue.max_wait` is {MAX_WAIT_S:.0f} s; all else is as nothing configured. A client
that is refused comes again after `retry-after`.

{crowd.ended.total()} requests, of which {unexpected} were neither answered nor refused nor left nor cut by an engine's
death; the longest took {crowd.longest_s:.0f} s. Of {sum(crowd.sessions.values())} sessions {crowd.sessions["ended"]}
ended. {twice} requests were answered whole by two engines; {again} of {len(crowd.recorder.began)} that reached an
engine reached a second one, after the first had failed.

""" + "\n".join(
        [
            *table(["request", "times"], [[name, str(count)] for name, count in sorted(crowd.ended.items())]),
            "",
            *table(["wave", *crowd.waves[0]], waves),
            "",
            "MB and objects are of the whole process, clients and engines included, once the wave is over.",
            "",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=2048)
    parser.add_argument("--waves", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/reports"))
    asked = parser.parse_args()
    if not virtual.CLOCK:
        parser.error("run it by `python -m benchmarks.virtual benchmarks.many_sessions`")
    logging.disable(logging.ERROR)  # of the apps of engines that die
    rng = random.Random(asked.seed)
    context = FIRST_WORDS + TURN_WORDS * sum(TURNS) // 4
    recorder = Recorder()
    capacity = asked.sessions * context // RATIO // ENGINES
    crowd = Crowd([MortalEngine(capacity, recorder, rng) for _ in range(ENGINES)], recorder, rng)
    report = asked.out / "many_sessions.md"
    virtual.run(run(crowd, asked.sessions, asked.waves, report))
    print(report.read_text())
    left = any(one["left over"] != "nothing" for one in crowd.waves)
    return int(left or not all(map(is_expected, crowd.ended)) or max(recorder.ended.values()) > 1)


if __name__ == "__main__":
    sys.exit(main())
