"""`POST /warm`, and `kvproxy warm` in front of simulated engines."""

from __future__ import annotations

import contextlib
import io
import json
from array import array
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvproxy.app import Proxy
from kvproxy.features.warming.command import WarmError, WarmOptions, own_proxy, read_prompts, run
from kvproxy.operate.config.load import load_config
from tests.cache.fleet import Place, simulated
from tests.cache.support import long_text
from tests.operate.admin.support import admin_of, audited, problems_of, proxy_of
from tests.support.clock import FakeClock

PROMPT = {"model": "tiny", "messages": [{"role": "system", "content": long_text("s", 200)}], "n": 2, "stream": True}


@contextlib.asynccontextmanager
async def warmed() -> AsyncIterator[tuple[Place, Proxy, httpx.AsyncClient]]:
    """Two simulated engines, a proxy in front of them and a client of its admin listener."""
    async with simulated() as place:
        proxy = proxy_of(endpoints=place.engines, policy="kv_aware", health={"active": False})
        async with proxy, admin_of(proxy) as client:
            yield place, proxy, client


async def test_a_prompt_is_computed_where_it_should_be_and_routing_knows() -> None:
    """At both, verified by a second send; a request with it is expected to find it."""
    async with warmed() as (_, proxy, client):
        answer = (await client.post("/warm?limit=2", json={"request": PROMPT})).json()
        assert [one["endpoint"] for one in answer["endpoints"]] == ["a", "b"]
        for one in answer["endpoints"]:
            assert one["result"] == "done"
            assert 0 < one["prompt_tokens"] - one["cached_tokens"] <= 32
        shown = (await client.post("/pick", json={"request": PROMPT})).json()
        assert all(one["matched_tokens"] > 200 for one in shown["candidates"])
        assert proxy.metrics.registry.get_sample_value(
            "kvproxy_kvcache_warmed_tokens_total", {"state": "found"}
        ) == sum(one["cached_tokens"] for one in answer["endpoints"])


async def test_one_replica_goes_where_it_is_already() -> None:
    """A second call finds it there."""
    async with warmed() as (_, _, client):
        first = (await client.post("/warm", json={"request": PROMPT})).json()["endpoints"]
        second = (await client.post("/warm", json={"request": PROMPT})).json()["endpoints"]
        assert [one["endpoint"] for one in first] == [one["endpoint"] for one in second]


def count_hot(proxy: Proxy, tokens: array[int], now: float) -> None:
    """Two conversations begin with these tokens."""
    service = proxy.kvcache
    assert service is not None
    hotness = service.actions.hotness
    for session in (7, 8):
        used = hotness.count_use([5], model="tiny", cache_salt="s", instance="a", now=now, session=session)
        hotness.learn_tokens(used, tokens)


@pytest.mark.parametrize("export", ["tokens", "hashes"])
async def test_hot_prefixes_are_exported_and_computed_again(export: str) -> None:
    """By its tokens, as lines that `kvproxy warm` reads; by hashes, to be compared. Each is one audit line."""
    cache = {"warming": {"export": export}}
    filters = ["inference_request", {"kvcache": {**cache, "cache_strategy": {"hot_content_threshold": 2}}}, "router"]
    async with simulated() as place:
        clock = FakeClock()
        proxy = proxy_of(clock=clock, endpoints=place.engines, policy="kv_aware", filters=filters)
        async with proxy, admin_of(proxy) as client:
            count_hot(proxy, array("I", range(300, 500)), clock())
            with audited() as lines:
                (line,) = (await client.get("/warm?limit=5")).text.splitlines()
            assert [(one["action"], one["prefixes"], one["told"]) for one in lines] == [("warm.export", 1, export)]
            if export == "hashes":
                assert json.loads(line) == {"prefix": f"{5:016x}", "model": "tiny", "tokens": 200, "uses": 2}
                return
            assert json.loads(line)["cache_salt"] == "s"
            body = {"path": "/v1/completions", "request": json.loads(line)}
            (warm,) = (await client.post("/warm", json=body)).json()["endpoints"]
            assert (warm["result"], warm["prompt_tokens"]) == ("done", 200)


async def test_nothing_is_exported_unasked() -> None:
    """Token ids are as good as text."""
    async with warmed() as (_, _, client):
        answer = await client.get("/warm")
        assert answer.status_code == 409
        assert "export: tokens" in answer.text


@pytest.mark.parametrize(
    ("query", "body", "status", "said"),
    [
        ("", {"request": PROMPT, "path": "/v1/embeddings"}, 422, "cannot be warmed"),
        ("", {"request": 3}, 422, "not a body of this path"),
        ("?limit=0", {"request": PROMPT}, 400, "not a possible number"),
        ("", {"request": {**PROMPT, "model": "other"}}, 200, ""),
    ],
)
async def test_unwarmable_prompts_are_refused(query: str, body: dict[str, Any], status: int, said: str) -> None:
    """With what to do; a model that no engine has is the engines' word."""
    async with warmed() as (_, _, client):
        answer = await client.post(f"/warm{query}", json=body)
        assert answer.status_code == status
        if said:
            assert said in answer.text
        else:
            assert [one["result"] for one in answer.json()["endpoints"]] == ["refused"]


async def test_failed_warmings_are_expected_nowhere() -> None:
    """The engine refused it: a request with the same prompt is not sent there for it."""
    other = {**PROMPT, "model": "other"}
    async with warmed() as (_, _, client):
        answer = (await client.post("/warm", json={"request": other})).json()
        assert [one["result"] for one in answer["endpoints"]] == ["refused"]
        shown = (await client.post("/pick", json={"request": other})).json()
        assert [one["matched_tokens"] for one in shown["candidates"]] == [0, 0]


async def test_a_proxy_without_the_filter_says_so() -> None:
    """There is nothing that could send it."""
    proxy = proxy_of(endpoints={"a": "http://127.0.0.1:9"}, policy="round_robin",
                     filters=["inference_request", "router"])  # fmt: skip
    async with admin_of(proxy) as client:
        answer = await client.post("/warm", json={"request": PROMPT})
        assert answer.status_code == 409
        assert "add kvcache" in str(problems_of(answer))


async def test_the_command_warms_a_file(tmp_path: Path) -> None:
    """In a process of its own, without a listener; what is done is counted."""
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps(PROMPT) + "\n\n" + json.dumps({"model": "tiny", "prompt": long_text("p", 100)}) + "\n")
    out, err = io.StringIO(), io.StringIO()
    async with simulated() as place:
        config = load_config({"endpoints": place.engines, "health": {"active": False}})
        async with own_proxy(config) as client:
            assert await run(WarmOptions(file, replicas=2), client, out=out, err=err) == 0
            again = io.StringIO()
            bad = tmp_path / "bad.jsonl"
            bad.write_text(json.dumps({"model": "other", "prompt": "x"}))
            assert await run(WarmOptions(bad, wait_s=0.0), client, out=again, err=err) == 1
    assert out.getvalue().startswith("2 prompts, 2 replicas: 4 done; ")
    assert "1 refused" in again.getvalue()
    assert "line 1: " in err.getvalue()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no prompts"),
        ('{"prompt": "a"}\n{"prompt"', "line 2: not JSON"),
        ('{"prompt": "a"}\n\n[]', "line 3: must be an object"),
        ('{"model": "m"}', 'line 1: must be an object with "messages" or "prompt"'),
        ('{"messages": [], "prompt": ""}', "line 1: must be an object"),
    ],
)
def test_a_bad_line_is_named_before_anything_is_sent(text: str, said: str, tmp_path: Path) -> None:
    """With its number."""
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(WarmError, match=said):
        read_prompts(path)


def test_a_line_has_a_bound(tmp_path: Path) -> None:
    """8 MiB."""
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "' + "x" * (8 << 20) + '"}')
    with pytest.raises(WarmError, match="line 1: longer than 8 MiB"):
        read_prompts(path)
