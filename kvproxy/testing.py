"""Simulated engines for tests of one's own: they answer as vLLM does, cache prefixes and count what was cached.

async with simulated_engines(3) as endpoints:
    async with httpx.AsyncClient(transport=kvproxy.AsyncTransport(endpoints=endpoints)) as client:
        ...
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator

from kvproxy.lab.served import serve_fleet
from kvproxy.lab.simulator.engine_io import EngineSettings
from kvproxy.lab.simulator.fleet import FleetSettings, clone_engines
from kvproxy.lab.simulator.vllm_settings import VllmSettings

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
    async with serve_fleet(FleetSettings(clone_engines(engine, count), None), rng=random.Random(seed)) as fleet:
        yield fleet.engines
