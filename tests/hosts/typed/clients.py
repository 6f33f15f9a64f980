"""Clients by transport, and a router."""

from collections.abc import Mapping

import httpx
import httpx2
import openai

import kvproxy
from kvproxy.testing import simulated_engines


async def ask(body: Mapping[str, object]) -> str:
    async with simulated_engines(2) as endpoints:
        transport = kvproxy.AsyncTransport(endpoints=endpoints)
        async with httpx.AsyncClient(transport=transport) as one, httpx2.AsyncClient(transport=transport) as two:
            openai.AsyncOpenAI(base_url="http://engines/v1", api_key="none", http_client=two)
            (await one.get("http://engines/v1/models")).raise_for_status()
        async with kvproxy.Router(endpoints=endpoints) as router:
            router.add_endpoint("c", "http://127.0.0.1:1", weight=2.0)
            try:
                async with router.place(body, session="s", tenant="t") as placed:
                    placed.first_token()
                    placed.finish({"prompt_tokens": 1})
                    return f"{placed.endpoint} {placed.url} {placed.predicted_cached_tokens}"
            except kvproxy.NoEndpoint as none:
                return f"{none.status} {none.retry_after_s}"


def ask_now() -> int:
    with httpx.Client(transport=kvproxy.Transport({"endpoints": {"a": "http://127.0.0.1:1"}})) as client:
        return client.get("http://engines/v1/models").status_code
