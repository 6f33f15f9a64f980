"""A simulated vLLM on a loopback socket, and the captures of a real one."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from kvproxy.lab.simulator.engine_io import EngineSettings
from kvproxy.lab.simulator.timing import EngineTiming
from kvproxy.lab.simulator.vllm_server import VllmApp
from kvproxy.lab.simulator.vllm_settings import VllmSettings
from kvproxy.lab.simulator.vllm_state import OnPrefilled
from tests.support.loopback import serve
from tests.support.vllms import KINDS

FIXTURES = Path(__file__).parents[2] / "fixtures"

#: A thousand times faster than the default, so that a test waits for nothing.
FAST = EngineSettings(512, 32, token_outputs=True, timing=EngineTiming(time_scale=0.001))
TINY = VllmSettings(model="tiny", root="models/tiny-qwen", max_model_len=8192, engine=FAST)


@dataclass(frozen=True, slots=True)
class Running:
    """A served app and a client of it."""

    app: VllmApp
    client: httpx.AsyncClient
    url: str

    async def faults(self, **values: Any) -> None:
        """Throws the fault switches."""
        (await self.client.post("/sim/faults", json=values)).raise_for_status()

    async def state(self) -> dict[str, Any]:
        """Return the simulator's state."""
        body: dict[str, Any] = (await self.client.get("/sim/state")).json()
        return body


@contextlib.asynccontextmanager
async def engine(
    settings: VllmSettings = TINY, *, on_prefilled: OnPrefilled | None = None, **changes: Any
) -> AsyncIterator[Running]:
    """Yield a simulated vLLM, entered and served."""
    settings = replace(settings, **changes)
    app = KINDS[type(settings)](
        settings, wall_clock=lambda: 1795252968.5, rng=random.Random(1), on_prefilled=on_prefilled
    )
    async with app, serve(app) as url, httpx.AsyncClient(base_url=url, trust_env=False) as client:
        yield Running(app, client, url)


def slow(decode_step_s: float = 0.02, **timing: Any) -> EngineSettings:
    """Return an engine whose tokens take a while, for what happens in mid-answer."""
    return replace(FAST, timing=EngineTiming(decode_step_s=decode_step_s, **timing))


def captures() -> dict[str, dict[str, Any]]:
    """Exchanges with a real vLLM 0.32, by name (the last of each name)."""
    lines = (FIXTURES / "vllm_http" / "api.jsonl").read_text().splitlines()
    return {entry["name"] + str(entry["status"]): entry for entry in map(json.loads, lines)}


def shape(value: Any) -> Any:
    """Keys in order and JSON types, values left out; lists by their first element."""
    if isinstance(value, dict):
        return {key: shape(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return type(value).__name__


def sse_events(raw: str) -> list[Any]:
    """Return the data of every event: JSON where it is JSON."""
    events = []
    for block in raw.split("\n\n"):
        for line in block.splitlines():
            if line.startswith("data: "):
                data = line.removeprefix("data: ")
                events.append(data if data == "[DONE]" else json.loads(data))
    return events
