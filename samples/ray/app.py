"""A chat API on Ray Serve whose replicas are chosen by their caches: serve run serve.yaml"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import StreamingResponse

from kvproxy.testing import simulated_engines

ROUTER = RequestRouterConfig(request_router_class="kvproxy.ray:KVCacheRouter", request_routing_stats_period_s=1)


@serve.deployment(num_replicas=3, ray_actor_options={"num_cpus": 0.1}, request_router_config=ROUTER)
class Engine:
    """Replica with an engine of its own; here a simulated one."""

    async def __init__(self) -> None:
        self.simulated = simulated_engines(1, model="my-model")
        self.url = (await self.simulated.__aenter__())["sim-0"]
        self.http = httpx.AsyncClient(timeout=600)

    def record_routing_stats(self) -> dict[str, Any]:
        """Return the engine's address, for its KV events and metrics."""
        return {"engine_url": self.url}

    async def chat(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        """Answer one chat, in pieces."""
        async with self.http.stream("POST", f"{self.url}/v1/chat/completions", json=body) as answer:
            async for piece in answer.aiter_bytes():
                yield piece


@serve.deployment(ray_actor_options={"num_cpus": 0.1})
class Gateway:
    """Front of the replicas. Its handle has the router."""

    def __init__(self, engine: DeploymentHandle[Any]) -> None:
        self.engine = engine.options(stream=True)

    async def __call__(self, request: Request) -> StreamingResponse:
        """Answer one chat."""
        body = await request.json()
        media_type = "text/event-stream" if body.get("stream") else "application/json"
        return StreamingResponse(self.engine.chat.remote(body), media_type=media_type)


chat = Gateway.bind(Engine.bind())
