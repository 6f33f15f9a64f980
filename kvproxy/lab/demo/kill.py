"""`kvproxy demo --kill-an-engine`: streams of an engine that dies go on with another one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from random import Random
from typing import TextIO

import httpx

from kvproxy.app import Proxy
from kvproxy.lab.demo.demo_traffic import read_events
from kvproxy.lab.served import serve_fleet
from kvproxy.lab.simulator.engine_io import EngineSettings
from kvproxy.lab.simulator.fleet import FleetSettings
from kvproxy.lab.simulator.vllm_settings import VllmSettings
from kvproxy.operate.config.load import load_config
from kvproxy.proxy.listener.server import Server

_MODEL = "sim"
_PATH = "/v1/chat/completions"
_TOKENS = 64
#: Tokens of every stream before the engine is killed.
_BEFORE = 8


class WatchedStream:
    """One answer as its client sees it."""

    def __init__(self, number: int) -> None:
        self.text = ""
        self.endpoint = ""
        self.begun = asyncio.Event()  # several tokens came
        self.error = ""
        self.pause_s = 0.0  # the longest between two tokens
        self._question = f"Tell me story number {number}, please."

    async def read(self, client: httpx.AsyncClient) -> None:
        """Read it to its end."""
        message = {"role": "user", "content": self._question}
        body = {"model": _MODEL, "messages": [message], "stream": True, "temperature": 0, "max_tokens": _TOKENS}
        clock = asyncio.get_running_loop().time
        chunks = 0
        last = None
        async with client.stream("POST", _PATH, json=body) as answer:
            self.endpoint = answer.headers.get("x-kvproxy-endpoint", "")
            async for event in read_events(answer):
                now = clock()
                self.pause_s = max(self.pause_s, now - (last or now))
                last = now
                self.error = self.error or str(event.get("error", ""))
                self.text += "".join(one["delta"].get("content") or "" for one in event.get("choices", ()))
                chunks += 1
                if chunks == _BEFORE:
                    self.begun.set()
        self.begun.set()


async def run_kill(sessions: int, out: TextIO) -> int:
    """Show it; 0 if every client got the answer of an undisturbed run."""
    async with AsyncExitStack() as stack:
        settings = VllmSettings(model=_MODEL, engine=EngineSettings(4096, 16, token_outputs=True))
        fleet = serve_fleet(FleetSettings(dict.fromkeys("ab", settings), None), rng=Random(1))
        urls = (await stack.enter_async_context(fleet)).engines
        config = load_config(
            {
                "endpoints": urls,
                "policy": "round_robin",
                "routes": [{"resume": "exact"}],
                "retry": {"min_per_second": float(max(1, sessions))},
            }
        )
        proxy = await stack.enter_async_context(Proxy(config))
        public = await stack.enter_async_context(Server(proxy, drain_s=1.0))
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=public.url, timeout=60))
        undisturbed = await _read_all(sessions, client)
        print(
            f"{sessions} streams through the proxy to two simulated engines, a and b; a is killed under them", file=out
        )
        streams = [WatchedStream(number) for number in range(sessions)]
        async with asyncio.TaskGroup() as group:
            for stream in streams:
                group.create_task(stream.read(client))
            await asyncio.gather(*(stream.begun.wait() for stream in streams))
            async with httpx.AsyncClient() as operator:
                await operator.post(f"{urls['a']}/sim/faults", json={"engine_dead": True})
        return _print_result(streams, undisturbed, out)


async def _read_all(sessions: int, client: httpx.AsyncClient) -> list[WatchedStream]:
    streams = [WatchedStream(number) for number in range(sessions)]
    await asyncio.gather(*(stream.read(client) for stream in streams))
    return streams


def _print_result(streams: Sequence[WatchedStream], undisturbed: Sequence[WatchedStream], out: TextIO) -> int:
    moved = sum(stream.endpoint == "a" for stream in streams)
    same = sum(not one.error and one.text == other.text for one, other in zip(streams, undisturbed, strict=True))
    print(f"{moved} of them had begun at a and went on at b", file=out)
    pauses = [1000 * max(stream.pause_s for stream in each) for each in (streams, undisturbed)]
    print("longest time without a token: {:.0f} ms, undisturbed {:.0f} ms".format(*pauses), file=out)
    print(f"{same} of {len(streams)} clients got the answer of an undisturbed run, word for word", file=out)
    return 0 if same == len(streams) else 1
