"""samples/nginx: a real nginx with njs asks `POST /pick` where to, and says when the answer is through."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvproxy.app import Proxy
from kvproxy.operate.config.load import load_config
from kvproxy.proxy.listener.server import Server
from tests.cache.fleet import simulated
from tests.cache.support import long_text
from tests.support.ports import free_port
from tests.support.until import until

SAMPLE = Path(__file__).parent.parent.parent / "samples" / "nginx"
MODULE = Path("/usr/lib/nginx/modules/ngx_http_js_module.so")
pytestmark = [
    pytest.mark.services,
    pytest.mark.skipif(
        shutil.which("nginx") is None or not MODULE.is_file(),
        reason="needs nginx with njs (apt install nginx libnginx-mod-http-js)",
    ),
]


@contextlib.asynccontextmanager
async def running_nginx(folder: Path, *, admin: int, engines: list[int]) -> AsyncIterator[str]:
    """Its URL; it asks the admin listener at this port."""
    port = free_port()
    ports = {8080: port, 8889: admin, 8101: engines[0], 8102: engines[1]}
    text = (SAMPLE / "nginx.conf").read_text()
    text = re.sub(r"(?<=:)\d{4}\b", lambda found: str(ports[int(found[0])]), text)
    (folder / "nginx.conf").write_text(text)
    shutil.copy(SAMPLE / "picker.js", folder)
    process = await asyncio.create_subprocess_exec("nginx", "-p", str(folder), "-c", str(folder / "nginx.conf"))
    try:
        async with httpx.AsyncClient() as client, asyncio.timeout(30):
            while True:
                with contextlib.suppress(httpx.TransportError):
                    await client.get(f"http://127.0.0.1:{port}/health")
                    break
                await asyncio.sleep(0.02)
        yield f"http://127.0.0.1:{port}/v1/chat/completions"
    finally:
        process.terminate()
        await process.wait()


@contextlib.asynccontextmanager
async def place(folder: Path, **config: Any) -> AsyncIterator[tuple[Proxy, str, httpx.AsyncClient]]:
    """Engines, the picker's side of kvproxy, and nginx before them."""
    async with simulated() as world:
        raw = {"endpoints": world.engines, "policy": "kv_aware", "health": {"active": False}, **config}
        async with Proxy(load_config(raw)) as proxy, Server(proxy.admin, drain_s=0.1) as admin:
            engines = [int(url.rpartition(":")[2]) for url in world.engines.values()]
            async with (
                running_nginx(folder, admin=admin.port, engines=engines) as url,
                httpx.AsyncClient(timeout=60) as client,
            ):
                yield proxy, url, client


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": text}], **fields}


def counted(proxy: Proxy, result: str) -> float:
    return proxy.metrics.registry.get_sample_value("kvproxy_pick_reservations_total", {"result": result}) or 0.0


async def test_turns_go_where_their_prompt_lies_and_places_come_back(tmp_path: Path) -> None:
    """Streamed or not; the reservation is settled when the answer is through."""
    async with place(tmp_path) as (proxy, url, client):
        cached = []
        for number in range(3):
            for topic in ("one ", "two "):
                body = chat(long_text(topic) + f" {number}")
                answer = (await client.post(url, json=body)).raise_for_status().json()
                if number:
                    cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert all(tokens > 0 for tokens in cached)
        streamed = await client.post(url, json=chat(long_text("one "), stream=True))
        assert streamed.text.endswith("data: [DONE]\n\n")
        await until(lambda: counted(proxy, "success") == 7)
        assert not any(endpoint.load.in_flight for endpoint in proxy.clusters["default"].endpoints)


async def test_refusals_reach_the_client_and_engines_answers_are_told(tmp_path: Path) -> None:
    """404 for a model that none serves; an engine's own 400 is a client's error."""
    async with place(tmp_path) as (proxy, url, client):
        assert (await client.post(url, json=chat("x", max_tokens=-1))).status_code == 400
        await until(lambda: counted(proxy, "client_error") == 1)
    endpoints = [{"id": "a", "url": "http://127.0.0.1:9", "models": ["other"]}]
    async with place(tmp_path, endpoints=endpoints) as (_, url, client):
        assert (await client.post(url, json=chat("x"))).status_code == 404


async def test_without_an_answer_of_the_picker_requests_go_on(tmp_path: Path) -> None:
    """Round robin: here its question is refused, as no JSON object."""
    async with place(tmp_path) as (proxy, url, client):
        answer = await client.post(url, content=b"no JSON", headers={"content-type": "application/json"})
        assert answer.status_code == 400  # the engine's own
        assert counted(proxy, "made") == 0
