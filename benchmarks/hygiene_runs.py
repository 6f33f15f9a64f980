"""The runs of `benchmarks.prefix_hygiene`: sessions with one planted habit beside a twin, and clean traffic."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.hygiene_traffic import CLIENTS, HABITS, Client, Dialogue, words
from kvproxy.app import Proxy
from kvproxy.lab.simulator.engine_io import EngineSettings
from kvproxy.lab.simulator.fleet import Fleet, FleetSettings
from kvproxy.lab.simulator.timing import EngineTiming
from kvproxy.lab.simulator.vllm_settings import VllmSettings
from kvproxy.operate.config.load import load_config
from kvproxy.proxy.listener.server import Server

TURNS = 6
SPARED_TOKENS, SPARED_SHARE = 256, 0.1


@dataclass
class World:
    """Running proxy with its reports of breaks, and a client."""

    proxy: Proxy
    http: httpx.AsyncClient
    rng: random.Random
    sent: int = 0

    async def send(self, client: Client, dialogue: Dialogue, session: str, agent: str = "") -> Turn:
        """One request."""
        self.sent += 1
        request_id = f"r{self.sent}"
        headers = {**client.headers, client.session_header: session, "x-request-id": request_id}
        if agent and client.agent_header:
            headers[client.agent_header] = agent
        body = client.body(dialogue, self.rng)
        answer = await self.http.post(client.path, json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        prompt, cached = client.usage(answer.json())
        found = next((one for one in reversed(self.breaks.latest) if one.request_id == request_id), None)
        said = None if found is None else (found.found.cause.value, found.found.part, found.found.tokens)
        return Turn(prompt, cached, answer.headers["x-kvproxy-endpoint"], said)

    @property
    def breaks(self) -> Any:
        """State of the service."""
        assert self.proxy.kvcache is not None
        observer: Any = self.proxy.kvcache.observers.by_feature["hygiene"]
        return observer.book


@dataclass(frozen=True)
class Turn:
    """Outcome of a request: tokens, endpoint, and the break that was reported (cause, part, tokens)."""

    prompt: int
    cached: int
    endpoint: str
    said: tuple[str, str, int] | None


@asynccontextmanager
async def world(*, blocks: int, count: int, engine: tuple[str, str] | None = None, **more: Any) -> AsyncIterator[World]:
    """`count` simulated engines of so many blocks of 16 tokens, or the real one."""
    timing = EngineTiming(time_scale=0.02)
    template = VllmSettings(
        loras=("sim-b",), engine=EngineSettings(blocks, 16, token_outputs=True, timing=timing), max_model_len=32_768
    )
    fleet = Fleet(FleetSettings({f"e{n}": template for n in range(count)}, controller=None), rng=random.Random(1))
    async with AsyncExitStack() as stack:
        endpoints = {"e0": engine[0]} if engine else {}
        if engine is None:
            await stack.enter_async_context(fleet)
            for name, app in fleet.engines.items():
                endpoints[name] = (await stack.enter_async_context(Server(app, drain_s=0.1))).url
        raw = {"endpoints": endpoints, "policy": "kv_aware", "health": {"active": False}, **more}
        proxy = await stack.enter_async_context(Proxy(load_config(raw)))
        server = await stack.enter_async_context(Server(proxy, drain_s=0.1))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=server.url, timeout=60.0))
        yield World(proxy, http, random.Random(7))


# planted


@dataclass
class Planted:
    """One habit of one client."""

    habit: str
    client: str
    breaks: int = 0
    named: int = 0
    said: set[tuple[str, str]] = field(default_factory=set)
    tokens_said: int = 0
    tokens_computed: int = 0


async def plant(world: World, client: Client, name: str, *, model: str, lines: int) -> Planted:
    """Play a session with the habit beside a twin without it."""
    habit, rng, found = HABITS[name], random.Random(f"{client.name}{name}"), Planted(name, client.name)
    header = client.name == "claude-code"
    dialogue, twin = (Dialogue.begun(rng, lines=lines, header=header) for _ in range(2))
    twin.tools = list(dialogue.tools)
    dialogue.model = twin.model = model
    for turn in range(TURNS):
        if turn:
            dialogue.go_on(rng)
            twin.go_on(rng)
        broken = turn > 0 and (turn == TURNS - 2 or not habit.once)
        sent = dialogue.copy()
        if broken or (not habit.once and turn == 0):
            habit.change(dialogue if habit.once else sent, turn, rng)
            sent = dialogue.copy() if habit.once else sent
        clean = await world.send(client, twin, f"{client.name}-{name}-twin")
        done = await world.send(client, sent, f"{client.name}-{name}")
        if broken:
            found.breaks += 1
            extra = (done.prompt - done.cached) - (clean.prompt - clean.cached)
            found.tokens_computed += extra if habit.cause != "compaction" else done.prompt - done.cached
        if done.said is not None:
            found.said.add(done.said[:2])
            found.tokens_said += done.said[2]
            found.named += broken and habit.is_named(client, *done.said[:2])
    return found


async def run_planted(engine: tuple[str, str] | None, lines: int) -> list[Planted]:
    """Every habit of every client that can have it."""
    found = []
    async with world(blocks=60_000, count=1, engine=engine) as place:
        for client in CLIENTS:
            for name, habit in HABITS.items():
                usable = client.path in habit.apis and (engine is None or name != "another model")
                if usable:
                    found.append(await plant(place, client, name, model=engine[1] if engine else "sim", lines=lines))
    return found


# clean


@dataclass
class Clean:
    """True events, and reported ones."""

    turns: int = 0
    sessions: int = 0
    truth: Counter[str] = field(default_factory=Counter)
    said: Counter[str] = field(default_factory=Counter)
    false: list[Any] = field(default_factory=list)
    wrong: int = 0


class CleanSession:
    """One client's session that breaks nothing but by compaction."""

    def __init__(self, place: World, client: Client, number: int, tally: Clean) -> None:
        self.place, self.client, self.tally = place, client, tally
        self.name = f"clean-{number}"
        self.rng = random.Random(number)
        self.turns = 0
        self.last: dict[str, Turn] = {}  # by thread: what an engine should hold

    async def send(self, dialogue: Dialogue, thread: str, *, goes_on: bool = True, compacted: bool = False) -> None:
        """One turn of a thread; `goes_on`: it begins with the thread's last prompt."""
        agent = thread if thread.startswith("agent") else ""
        turn, last = await self.place.send(self.client, dialogue, self.name, agent), self.last.get(thread)
        self.last[thread] = turn
        self.tally.turns += 1
        self.turns += 1
        truth = "compaction" if compacted else ""
        if last is not None and goes_on:
            lost = last.prompt - turn.cached
            if lost > max(SPARED_TOKENS, SPARED_SHARE * last.prompt):
                truth = "evicted" if turn.endpoint == last.endpoint else "moved"
        self.tally.truth[truth] += bool(truth)
        if turn.said is not None:
            cause = turn.said[0]
            self.tally.said[cause] += 1
            if cause not in ("evicted", "moved", "compaction") or (cause == "compaction" and not compacted):
                self.tally.false.append((self.client.name, thread, turn.said))
            elif cause != truth:
                self.tally.wrong += 1

    async def run(self, turns: int) -> None:
        """Its life."""
        rng = self.rng
        main = Dialogue.begun(rng, header=self.client.name == "claude-code")
        await self.send(main, "main")
        while self.turns < turns:
            main.go_on(rng)
            await self.send(main, "main")
            if rng.random() < 0.06:
                await self.send(main, "main")  # the client did not hear, and asks again
            if rng.random() < 0.06:
                await self.side_request(main)
            if rng.random() < 0.08:
                await asyncio.gather(*(self.sub_agent(main, n) for n in range(rng.randint(1, 3))))
            if rng.random() < 0.05 and len(main.messages) > 4:
                await self.taken_back(main)
            if rng.random() < 0.05 and len(main.messages) >= 11:
                HABITS["compaction to a summary"].change(main, 0, rng)
                await self.send(main, "main", goes_on=False, compacted=True)

    async def sub_agent(self, main: Dialogue, number: int) -> None:
        """Another system prompt, or a branch of the same conversation; sub-agents run side by side."""
        rng = random.Random(self.rng.random())
        thread = f"agent-{number}-{rng.random()}"
        own = main.copy()
        if rng.random() < 0.5:
            own.system, own.messages = [words(rng, 12) for _ in range(30)], [own.messages[0]]
        else:
            own.messages[-1] = ("user", words(rng, 40))
        for _ in range(rng.randint(1, 4)):
            await self.send(own, thread)
            own.go_on(rng)

    async def side_request(self, main: Dialogue) -> None:
        """Send a side request, such as one for a title."""
        side = main.copy()
        side.system, side.tools = [words(self.rng, 30)], []
        side.messages = [("user", "Give a title: " + main.messages[0][1] + words(self.rng, 300))]
        await self.send(side, f"side-{self.rng.random()}")

    async def taken_back(self, main: Dialogue) -> None:
        """Take a turn back and send another text."""
        main.messages = [*main.messages[:-3], ("user", words(self.rng, 60))]
        await self.send(main, "main", goes_on=False)


async def run_clean(turns: int) -> Clean:
    """Sessions side by side, eight at a time."""
    tally, gate, each = Clean(), asyncio.Semaphore(8), 20
    async with world(blocks=4_000, count=2) as place:

        async def live(number: int) -> None:
            async with gate:
                if tally.turns < turns:
                    tally.sessions += 1
                    await CleanSession(place, CLIENTS[number % 3], number, tally).run(each)

        await asyncio.gather(*(live(number) for number in range(turns)))
    return tally
