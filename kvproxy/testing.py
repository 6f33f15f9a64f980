"""Simulated engines for tests of one's own: they answer as vLLM does, cache prefixes and count what was cached.

async with simulated_engines(3) as endpoints:
    async with httpx.AsyncClient(transport=kvproxy.AsyncTransport(endpoints=endpoints)) as client:
        ...
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator

from kvproxy.lab.simulator.engine_io import EngineSettings
from kvproxy.lab.simulator.fleet import Fleet, FleetSettings, clone_engines
from kvproxy.lab.simulator.vllm_settings import VllmSettings
from kvproxy.proxy.listener.server import Server

BLOCK_TOKENS = 16


@contextlib.asynccontextmanager
async def simulated_engines(
    count: int = 2, *, model: str = "sim", capacity_tokens: int = 65_536, seed: int = 0
) -> AsyncIterator[dict[str, str]]:
    """Serve `count` engines on free ports of 127.0.0.1 and yield `{id: url}`.

    Each holds `capacity_tokens` of KV cache in blocks of 16 tokens and takes realistic time. Answers are random words
    drawn from `seed`; their `usage` has the prompt tokens that were cached.
    """
    engine = VllmSettings(
        model=model, engine=EngineSettings(capacity_tokens // BLOCK_TOKENS, BLOCK_TOKENS, token_outputs=True)
    )
    async with contextlib.AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(
            Fleet(FleetSettings(clone_engines(engine, count)), rng=random.Random(seed))
        )
        servers = {
            name: await stack.enter_async_context(Server(app, drain_s=0.5)) for name, app in fleet.engines.items()
        }
        yield {name: server.url for name, server in servers.items()}
