"""Facts about an engine that kvproxy reads outside the request path."""

from __future__ import annotations

import json

import pytest

from tests.real.conftest import Saw
from tests.real.engines.vllm import BLOCK_TOKENS
from tests.real.pair import Pair, engine_client
from tests.real.prompts import chat, text
from tests.support.proxy import running_proxy

pytestmark = pytest.mark.real


async def test_metrics(pair: Pair, saw: Saw) -> None:
    """Every figure is found, and the counters grow by what was asked."""
    body = chat(pair.model.name, text(200, seed="scrape"))
    async with running_proxy({"a": pair.a.url}) as proxy, engine_client(pair.a) as engine:
        before = await engine.fetch_metrics()
        tokens = (await proxy.client.post("/v1/chat/completions", json=body)).json()["usage"]["prompt_tokens"]
        after = await engine.fetch_metrics()
    assert after.cache is not None
    assert (after.cache.block_tokens, after.cache.num_gpu_blocks) == (BLOCK_TOKENS, pair.a.blocks)
    assert (after.cache.prefix_caching, after.cache.ranks) == (True, 1)
    assert after.prompt_tokens is not None
    assert before.prompt_tokens is not None
    assert after.prompt_tokens - before.prompt_tokens == tokens
    assert None not in (after.kv_usage, after.waiting, after.running, after.prefix_hits_tokens, after.generation_tokens)
    saw(
        f"{after.cache.num_gpu_blocks} blocks of {after.cache.block_tokens} tokens, KV usage {after.kv_usage}, "
        f"prompt tokens {before.prompt_tokens} -> {after.prompt_tokens}"
    )


async def test_version_models_and_event_streams(pair: Pair, saw: Saw) -> None:
    """An engine's information about itself is read, addresses included."""
    async with engine_client(pair.a) as engine:
        version = await engine.fetch_version()
        models = await engine.list_models()
        (source,) = await engine.kv_event_sources()
    assert [(model.id, model.root) for model in models] == [(pair.model.name, str(pair.model.folder))]
    assert source.endpoint.startswith("tcp://127.0.0.1:")
    assert source.replay_endpoint is not None
    saw(f"vLLM {version}, events at {source.endpoint}, replay at {source.replay_endpoint}")


async def test_load_in_a_response_header(pair: Pair, saw: Saw) -> None:
    """vLLM's ORCA report passes the proxy, in both formats."""
    body = chat(pair.model.name, "hello")
    reports = {}
    async with running_proxy({"a": pair.a.url}) as proxy:
        for form in ("JSON", "TEXT"):
            headers = {"endpoint-load-metrics-format": form}
            answer = await proxy.client.post("/v1/chat/completions", json=body, headers=headers)
            reports[form] = answer.headers["endpoint-load-metrics"]
    assert json.loads(reports["JSON"].removeprefix("JSON "))["named_metrics"]["num_requests_waiting"] == 0
    assert "named_metrics.num_requests_waiting=0" in reports["TEXT"]
    saw(f"load report: {reports}")
