"""A proxy is stopped and started again in front of engines that went on: what they hold is known at once."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvproxy.cache.service import KvCache
from kvproxy.cluster.routing.policy import PRECISE
from kvproxy.features.snapshot.metrics import SnapshotMetrics
from kvproxy.features.snapshot.restart import WarmRestart
from kvproxy.lab.simulator.kv_event_publisher import PublisherSettings
from kvproxy.operate.config.load import load_config
from tests.cache.fleet import Place, simulated
from tests.cache.support import long_text
from tests.support.process import kvproxy_serve
from tests.support.proxy import RunningProxy, running_proxy
from tests.support.until import until

SAID, MORE = long_text("w", 300), long_text("x", 60)


@contextlib.asynccontextmanager
async def life(place: Place, path: Path | None, **kvcache: Any) -> AsyncIterator[RunningProxy]:
    """Run a proxy from its start to its graceful end; it keeps its snapshot at `path`."""
    chosen = {"engine_metrics_interval": 0, "snapshot": {"path": "" if path is None else str(path)}, **kvcache}
    filters = ["inference_request", {"kvcache": chosen}, "router"]
    async with running_proxy(place.engines, policy="kv_aware", filters=filters) as proxy:
        yield proxy


def service(proxy: RunningProxy) -> KvCache:
    kvcache = proxy.proxy.kvcache
    assert kvcache is not None
    return kvcache


def counted(proxy: RunningProxy, name: str, **labels: str) -> float:
    """Over all series with these labels, whatever others they have."""
    families = proxy.proxy.metrics.registry.collect()
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())


async def ask(client: httpx.AsyncClient, *contents: str) -> tuple[str, dict[str, Any], str]:
    """Send a chat's turn; returns the engine that served it, its usage, and the decision."""
    roles = ("user", "assistant")
    messages = [{"role": roles[index % 2], "content": content} for index, content in enumerate(contents)]
    body = {"model": "tiny", "messages": messages, "max_tokens": 1}
    answer = await client.post("/v1/chat/completions", json=body, headers={"x-kvproxy-debug": "1"})
    assert answer.status_code == 200
    headers = answer.headers
    return headers["x-kvproxy-endpoint"], answer.json()["usage"], headers["x-kvproxy-decision"]


async def test_a_chats_next_turn_goes_to_the_same_endpoint(tmp_path: Path) -> None:
    """Predicted from the snapshot, and true: the engine had it cached."""
    async with simulated(names=("a", "b", "c")) as place:
        async with life(place, tmp_path / "kept") as before:
            homes = {}
            for number in range(12):
                homes[number], _, _ = await ask(before.client, f"{number} {SAID}")
        assert len(set(homes.values())) > 1  # ties are drawn: one for all is one case of 177,147
        async with life(place, tmp_path / "kept") as after:
            for number, home in homes.items():
                endpoint, usage, decision = await ask(after.client, f"{number} {SAID}", "yes", MORE)
                assert endpoint == home
                assert "reason=overlap" in decision
                assert usage["prompt_tokens_details"]["cached_tokens"] > 500
            assert counted(after, "kvproxy_kvcache_predictions_total", source="approximate", result="hit") == 12


async def test_without_a_snapshot_nothing_is_known(tmp_path: Path) -> None:
    """The test above would see this otherwise."""
    async with simulated() as place:
        async with life(place, None) as before:
            await ask(before.client, SAID)
        async with life(place, None) as after:
            _, _, decision = await ask(after.client, SAID, "yes", MORE)
            assert "reason=no_overlap" in decision
            assert service(after).observers.find(WarmRestart) is None


async def test_an_eviction_in_the_meantime_is_noticed(tmp_path: Path) -> None:
    """The first answer contradicts the snapshot; from then on the index is right."""
    async with simulated() as place:
        async with life(place, tmp_path / "kept") as before:
            home, _, _ = await ask(before.client, SAID)
            await ask(before.client, "another " + SAID)
        async with httpx.AsyncClient(base_url=place.engines[home]) as engine:
            (await engine.post("/reset_prefix_cache")).raise_for_status()
        async with life(place, tmp_path / "kept") as after:
            held = service(after).overlap.indexes["default"].approximate
            endpoint, usage, _ = await ask(after.client, SAID, "yes", MORE)
            assert endpoint == home
            assert usage["prompt_tokens_details"]["cached_tokens"] == 0
            assert counted(after, "kvproxy_kvcache_predictions_total", source="approximate", result="miss") == 1
            assert held.counts.entries > 0
            _, usage, _ = await ask(after.client, SAID, "yes", MORE, "and", "more")
            assert usage["prompt_tokens_details"]["cached_tokens"] > 500
            assert counted(after, "kvproxy_kvcache_predictions_total", source="approximate", result="hit") == 1


async def test_an_engine_that_began_anew_is_known_to_be_empty(tmp_path: Path) -> None:
    """By its own start time, before any request had to find out."""
    async with simulated(names=("a",)) as place:
        async with life(place, tmp_path / "kept", engine_metrics_interval="1h") as before:
            await service(before).scraper.scrape_all()
            await ask(before.client, SAID)
        place.fleet.engines["a"].state.metrics.started_at += 60.0  # as a new process would show it
        async with life(place, tmp_path / "kept", engine_metrics_interval="1h") as after:
            held = service(after).overlap.indexes["default"].approximate
            assert held.counts.entries > 0
            await service(after).scraper.scrape_all()
            assert held.counts.held_blocks(held.counts.endpoints[0]) == 0
            _, _, decision = await ask(after.client, SAID, "yes", MORE)
            assert "reason=no_overlap" in decision


async def test_the_precise_index_needs_no_file() -> None:
    """The engines replay their events to the new process: block by block, what they hold now."""
    prompt = list(range(1, 257))

    async def complete(proxy: RunningProxy) -> str:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 1}
        answer = await proxy.client.post("/v1/completions", json=body)
        assert answer.status_code == 200
        return str(answer.headers["x-kvproxy-endpoint"])

    def followed(proxy: RunningProxy) -> bool:
        return len(service(proxy).overlap.indexes["default"].exact) == 2

    async with simulated(engine={"kv_events": PublisherSettings()}) as place:
        async with life(place, None, kv_events=True) as before:
            await until(lambda: followed(before))
            home = await complete(before)
        async with life(place, None, kv_events=True) as after:
            await until(lambda: followed(after))
            assert after.metric("kvproxy_kvcache_index_blocks", index="approximate") == 0
            assert after.metric("kvproxy_kvcache_index_blocks", index="precise") == 8
            assert after.metric("kvproxy_kv_event_batches_total", endpoint=home, outcome="replayed") > 0
            assert await complete(after) == home
            source = PRECISE
            assert counted(after, "kvproxy_kvcache_predicted_tokens_total", source=source) == 256


async def test_a_reload_neither_restores_again_nor_loses_the_running_index(tmp_path: Path) -> None:
    """Not with the same settings, and not with others: what was routed where is the cluster's, not the filter's."""

    def configured(place: Place, *more: str, **kvcache: Any) -> Any:
        clusters = {name: {"endpoints": place.engines, "policy": "kv_aware"} for name in ("default", *more)}
        settings = {"engine_metrics_interval": 0, "snapshot": {"path": str(tmp_path / "kept")}, **kvcache}
        return load_config(
            {
                "clusters": clusters,
                "routes": [{"cluster": "default"}],
                "filters": ["inference_request", {"kvcache": settings}, "router"],
            }
        )

    async with simulated() as place, life(place, tmp_path / "kept") as proxy:
        home, _, _ = await ask(proxy.client, SAID)
        turns = [SAID]
        for config in (
            configured(place),
            configured(place, min_matched_tokens=2),
            configured(place, "second"),
            configured(place, snapshot={"path": str(tmp_path / "elsewhere")}),
            configured(place, snapshot={}),
        ):
            await proxy.proxy.reload(config)
            turns += ["yes", MORE]
            endpoint, usage, decision = await ask(proxy.client, *turns)
            assert endpoint == home
            assert "reason=overlap" in decision
            assert usage["prompt_tokens_details"]["cached_tokens"] > 0
        restores = proxy.proxy.metrics.group(SnapshotMetrics).restores
        assert [sample.labels["outcome"] for one in restores.collect() for sample in one.samples if sample.value] == [
            "none"
        ]


@pytest.mark.slow
async def test_a_process_restarted_by_its_supervisor(tmp_path: Path) -> None:
    """SIGTERM, and the same command again; the operator sees it in the log, the status and the metrics."""
    file = tmp_path / "config.yaml"
    async with simulated() as place:
        endpoints = "".join(f"  {name}: {url}\n" for name, url in place.engines.items())
        file.write_text(
            f"endpoints:\n{endpoints}policy: kv_aware\nlisten: ':0'\nadmin: '0'\nfilters:\n  - inference_request\n"
            f"  - kvcache: {{snapshot: {{path: '{tmp_path}/kept'}}}}\n  - router\n"
        )
        async with kvproxy_serve("-c", str(file)) as proxy, httpx.AsyncClient(base_url=proxy.url) as client:
            home, _, _ = await ask(client, SAID)
            proxy.process.send_signal(signal.SIGTERM)
            await asyncio.wait_for(proxy.process.wait(), 60)
        async with kvproxy_serve("-c", str(file)) as proxy, httpx.AsyncClient(base_url=proxy.url) as client:
            endpoint, _, decision = await ask(client, SAID, "yes", MORE)
            assert (endpoint, "reason=overlap" in decision) == (home, True)
            assert any("[kvcache] warm start: " in line for line in proxy.lines)
            admin = next(line.split("admin listener on ")[1].split()[0] for line in proxy.lines if "admin list" in line)
            status = (await client.get(f"{admin}/cache/status")).json()["snapshot"]
            assert (status["restored"], status["restored_endpoints"], status["failing"]) == ("restored", 2, False)
            assert status["bytes"] == (tmp_path / "kept").stat().st_size
            page = (await client.get(f"{admin}/metrics")).text
            assert 'kvproxy_kvcache_snapshot_restores_total{outcome="restored"} 1.0' in page
            assert "\nkvproxy_kvcache_snapshot_age_seconds " in page


async def test_engines_that_are_down_do_not_hold_up_the_start(tmp_path: Path) -> None:
    """Nothing is asked of them: the snapshot is taken at its word until one of them says otherwise."""
    async with simulated() as place, life(place, tmp_path / "kept") as before:
        await ask(before.client, SAID)
    async with life(place, tmp_path / "kept", engine_metrics_interval="1h") as after:
        await service(after).scraper.scrape_all()
        assert after.metric("kvproxy_kvcache_snapshot_restores_total", outcome="restored") == 1
        assert after.metric("kvproxy_kvcache_index_blocks", index="approximate") > 0
