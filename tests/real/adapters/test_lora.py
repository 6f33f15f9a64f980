"""Two real vLLM servers with LoRA adapters: found, placed, apart in the cache, and tried elsewhere once unloaded."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.operate.admin.support import admin_of
from tests.operate.doctor.setup import visit
from tests.real.conftest import Saw, needs_memory
from tests.real.engines import vllm
from tests.real.engines.place import HERE, TINY, VLLM
from tests.real.engines.vllm import Vllm
from tests.real.pair import Pair, running_pair
from tests.real.prompts import chat, text
from tests.support.proxy import RunningProxy, running_proxy
from tests.support.until import until

pytestmark = pytest.mark.real

FILTERS: list[Any] = ["request_id", "inference_request", {"kvcache": {"kv_events": True}}, "router"]
KNOWN_ELSEWHERE = {"reason": "unknown_model"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two adapters of the tiny model."""
    made = {name: tmp_path_factory.mktemp(name) for name in ("lora-a", "lora-b")}
    for number, folder in enumerate(made.values()):
        script = HERE / "inside" / "lora_adapter.py"
        subprocess.run([VLLM.python, script, TINY.folder, folder, str(number)], check=True)
    return made


@pytest.fixture(scope="module")
def pair(folders: dict[str, Path], saw: Saw) -> Iterator[Pair]:
    """Run the pair: `a` has both adapters and `b` the second one, each with a slot for one at a time."""
    needs_memory(gib=6)
    saw("starting two vLLM servers with --enable-lora")
    served = {"a": ("lora-a", "lora-b"), "b": ("lora-b",)}
    servers = [
        Vllm(
            f"lora-{name}",
            TINY,
            core=core,
            further=[
                *("--enable-lora", "--max-loras", "1", "--max-lora-rank", "8", "--lora-modules"),
                *(f"{one}={folders[one]}" for one in names),
            ],
            environment={"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"},
        )
        for core, (name, names) in enumerate(served.items())
    ]
    with running_pair(*servers) as running:
        yield running


async def ask(proxy: RunningProxy, model: str, *turns: str, **fields: Any) -> httpx.Response:
    body = chat(model, *turns, max_tokens=4, **fields)
    return await proxy.client.post("/v1/chat/completions", json=body, timeout=60)


def proxy_of(pair: Pair, **changes: Any) -> Any:
    return running_proxy(pair.urls, **{"policy": "kv_aware", "filters": FILTERS, **changes})


async def test_adapters_are_found_and_their_caches_are_apart(pair: Pair, saw: Saw) -> None:
    """By `/v1/models`; by KV events what is predicted of each is what the engine reuses of it, to the token."""
    async with proxy_of(pair) as proxy:
        listed = (await proxy.client.get("/v1/models")).json()["data"]
        assert {row["id"] for row in listed} == {"tiny", "lora-a", "lora-b"}
        cluster, kvcache = proxy.proxy.clusters["default"], proxy.proxy.kvcache
        assert [sorted(engine.adapters.names) for engine in cluster.engines] == [["lora-a", "lora-b"], ["lora-b"]]
        assert kvcache is not None
        indexes = kvcache.overlap.indexes["default"]
        await until(lambda: len(indexes.exact) == 2, within_s=30)
        said, rows = text(300, seed="adapters"), []
        for model in ("tiny", "lora-a", "lora-b") * 2:
            answer = await ask(proxy, model, said)
            answer.raise_for_status()
            await kvcache.actions.jobs.settled()
            async with admin_of(proxy.proxy) as admin:
                last = (await admin.get("/decisions?limit=1")).json()["decisions"][0]
            rows.append((model, last["endpoint"], last["matched_tokens"], last["cached_tokens"]))
        saw(f"model, endpoint, predicted, reused: {rows}")
        assert [(predicted, reused) for _, _, predicted, reused in rows[:3]] == [(0, 0)] * 3
        assert all(abs(predicted - reused) <= vllm.BLOCK_TOKENS and reused > 300 for *_, predicted, reused in rows[3:])
        assert {where for model, where, *_ in rows if model == "lora-a"} == {"a"}
        await kvcache.scraper.scrape_all()
        use = cluster.engines[0].adapters.use
        assert use is not None
        assert (use.slots, use.running <= {"lora-a", "lora-b"}) == (1, True)


async def test_an_unloaded_adapter_is_tried_elsewhere_once(pair: Pair, folders: dict[str, Path], saw: Saw) -> None:
    """The real 404 costs the client nothing, and its engine is asked again when it lists the adapter again."""
    async with proxy_of(pair) as proxy:
        (await proxy.client.get("/v1/models")).raise_for_status()
        cluster = proxy.proxy.clusters["default"]
        b = cluster.engines[1].adapters
        assert b.names == {"lora-b"}
        async with httpx.AsyncClient(base_url=pair.b.url, timeout=60) as engine:
            (await engine.post("/v1/unload_lora_adapter", json={"lora_name": "lora-b"})).raise_for_status()
        cluster.operator.drain_endpoint(cluster.endpoints[0].id)  # so that the first try is at b
        decided = await ask(proxy, "lora-b", text(40, seed="unloaded, alone"))
        assert decided.status_code == 404
        cluster.operator.drain_endpoint(cluster.endpoints[0].id, draining=False)
        cluster.adapters.observe_list("b", b, listed=["lora-b"])
        before = proxy.metric("kvproxy_retries_total", **KNOWN_ELSEWHERE)
        statuses = [(await ask(proxy, "lora-b", text(40, seed=f"unloaded {n}"))).status_code for n in range(6)]
        again = proxy.metric("kvproxy_retries_total", **KNOWN_ELSEWHERE) - before
        saw(f"statuses {statuses}, tried elsewhere {again:.0f} times; b lists {sorted(b.names)}")
        assert statuses == [200] * 6
        assert again <= 1
        async with httpx.AsyncClient(base_url=pair.b.url, timeout=60) as engine:
            load = {"lora_name": "lora-b", "lora_path": str(folders["lora-b"])}
            (await engine.post("/v1/load_lora_adapter", json=load)).raise_for_status()


async def test_the_doctor_finds_nothing_wrong_with_it(pair: Pair) -> None:
    report = await visit({"endpoints": pair.urls, "policy": "kv_aware", "filters": FILTERS})
    assert [one.what for one in report.findings if one.check == "models"] == []
    assert "adapter lora-a at a" in [one.what for one in report.passed]
