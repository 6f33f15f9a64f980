"""The coordinator client: requests, answers and refusals as the real one has them."""

from __future__ import annotations

import json
from array import array

import httpx
import pytest

from kvproxy.base.errors import BadResponse, NotSupported, Refused, UnknownInstance
from kvproxy.cache.clients.lmcache_coordinator import LMCacheCoordinatorClient
from kvproxy.cache.clients.lmcache_coordinator_wire import (
    CacheChange,
    CacheScope,
    DirectoryStats,
    FleetUsage,
    HeldPrefix,
    Instance,
    InstanceUsage,
    MemoryModule,
    Prefetch,
    PrefetchStatus,
)
from tests.cache.clients.support import Handler, Upstream

TOKENS = array("I", range(600))
SCOPE = CacheScope("models/tiny-qwen", cache_salt="tenant-a", world_size=2)
SENT = {"token_ids": list(TOKENS), "model_name": "models/tiny-qwen", "world_size": 2, "cache_salt": "tenant-a"}


def coordinator(handler: Handler | httpx.Response) -> tuple[LMCacheCoordinatorClient, Upstream]:
    upstream = Upstream(handler)
    return LMCacheCoordinatorClient(upstream.http, "http://127.0.0.1:9300"), upstream


def answering(body: object, *, status: int = 200) -> tuple[LMCacheCoordinatorClient, Upstream]:
    return coordinator(httpx.Response(status, json=body))


async def test_directory_lookup_is_per_model_and_salt() -> None:
    """Both shape the keys, as does the number of ranks."""
    key = {"chunk_hash_hex": "00ff", "model_name": "models/tiny-qwen", "kv_rank": 0}
    placement = {"instance_id": "mp-1", "incarnation": 1, "tier": "l1", "backend": "dram", "size_bytes": 9}
    client, upstream = answering({"chunks": 2, "results": [{"key": key, "placements": [placement]}]})
    found = await client.directory_lookup(SCOPE, TOKENS)
    assert upstream.body == SENT
    assert found.by_instance == {"mp-1": HeldPrefix(256)}


@pytest.mark.parametrize("tier", ["gpu", 5, None])
async def test_a_tier_nobody_knows_is_a_bad_response(tier: object) -> None:
    """Nothing is guessed into a match."""
    results = [{"key": {"chunk_hash_hex": "0"}, "placements": [{"instance_id": "a", "tier": tier}]}]
    with pytest.raises(BadResponse):
        await answering({"chunks": 1, "results": results})[0].directory_lookup(SCOPE, TOKENS)


async def test_instances() -> None:
    """Registered servers with their addresses."""
    row = {
        "instance_id": "mp-1",
        "ip": "127.0.0.1",
        "http_port": 8080,
        "registration_time": 1.0,
        "metadata": {"a": "b"},
    }
    client, _ = answering({"instances": [row, {"instance_id": "mp-2", "ip": "::1", "http_port": 1}]})
    assert await client.list_instances() == (
        Instance("mp-1", "127.0.0.1", 8080, 1.0, {"a": "b"}),
        Instance("mp-2", "::1", 1),
    )


async def test_usage_is_a_pressure_signal() -> None:
    """Per compartment; the ratio is missing where no capacity was declared."""
    module = {
        "tier": "l1",
        "backend": "dram",
        "shared": False,
        "used_bytes": 5,
        "capacity_bytes": 10,
        "usage_ratio": 0.5,
    }
    one = {"instance_id": "mp/1", "registered": True, "declared_capacity": True, "modules": [module]}
    expected = InstanceUsage("mp/1", True, True, (MemoryModule("l1", "dram", 5, 10, 0.5),))
    client, _ = answering({"instances": [one], "shared_modules": []})
    assert await client.fetch_usage() == FleetUsage((expected,))


async def test_pins_are_added_and_removed() -> None:
    """Unlike the controller's they can be taken back."""
    client, upstream = answering({"requested": 2, "affected": 4, "status": "pinned"})
    assert await client.pin(SCOPE, TOKENS) == CacheChange("pinned", 2, 4)
    assert await client.unpin(SCOPE, TOKENS) == CacheChange("pinned", 2, 4)
    assert [(request.method, json.loads(request.content)) for request in upstream.requests] == [
        ("POST", SENT),
        ("DELETE", SENT),
    ]


async def test_delete_names_instance_tier_and_force() -> None:
    """One server, L1 by default."""
    client, upstream = answering(
        {"instance_id": "mp-1", "requested": 2, "affected": 1, "skipped": 1, "status": "deleted"}
    )
    assert await client.delete("mp-1", SCOPE, TOKENS) == CacheChange("deleted", 2, 1, 1)
    assert upstream.body == {**SENT, "instance_id": "mp-1", "tier": "l1", "force": False}


async def test_prefetch_and_its_progress() -> None:
    """Submitted, then polled; a completed job is forgotten by the server."""
    client, upstream = answering({"instance_id": "mp-1", "request_id": "r/1", "chunks": 2, "status": "submitted"})
    assert await client.prefetch("mp-1", SCOPE, TOKENS) == Prefetch("mp-1", "submitted", "r/1", 2)
    assert upstream.body == {**SENT, "instance_id": "mp-1"}
    client, upstream = answering({"request_id": "r/1", "status": "completed", "found_keys": 4, "total_keys": 4})
    assert await client.prefetch_status("mp-1", "r/1") == PrefetchStatus("completed", 4, 4)
    assert upstream.requests[-1].url.raw_path == b"/cache/prefetches/mp-1/r%2F1"
    client, _ = answering({"request_id": "r/1", "status": "pending"})
    assert await client.prefetch_status("mp-1", "r/1") == PrefetchStatus("pending")


async def test_stats() -> None:
    """Size of the directory."""
    stats = {"num_keys": 4, "num_placements": 8, "l1_keys_by_instance": {"mp-1": 4}, "l1_size_bytes": 9}
    assert await answering(stats)[0].fetch_stats() == DirectoryStats(4, 8, {"mp-1": 4}, 9)


@pytest.mark.parametrize(
    ("status", "detail", "kind"),
    [
        (404, "instance 'mp-9' is not registered", UnknownInstance),
        (404, "Not Found", NotSupported),
        (502, "MP server mp-1 unreachable", Refused),
        (500, "internal error", Refused),
        (400, "invalid model_name", Refused),
    ],
)
async def test_refusals_by_kind(status: int, detail: str, kind: type[Refused]) -> None:
    """An unknown instance, a coordinator too old for the call, a server that is down."""
    client, _ = answering({"detail": detail}, status=status)
    for call in (
        client.directory_lookup(SCOPE, TOKENS),
        client.pin(SCOPE, TOKENS),
        client.prefetch("mp-9", SCOPE, TOKENS),
    ):
        with pytest.raises(Refused) as refused:
            await call
        assert type(refused.value) is kind


async def test_a_plain_text_500() -> None:
    """The real one sends it for a request that it cannot handle."""
    client, _ = coordinator(httpx.Response(500, text="Internal Server Error"))
    with pytest.raises(Refused, match="500"):
        await client.directory_lookup(SCOPE, TOKENS)


def placements(count: int) -> dict[str, object]:
    """So many chunks, each held by one instance."""
    rows = [
        {"key": {"chunk_hash_hex": f"{n:064x}"}, "placements": [{"instance_id": "mp-1", "tier": "l1"}]}
        for n in range(count)
    ]
    return {"chunks": count, "results": rows}


async def test_a_long_directory_answer_is_read_like_a_short_one() -> None:
    """Beside the event loop."""
    client, _ = answering(placements(2000))
    found = await client.directory_lookup(SCOPE, array("I", range(2000 * 256)))
    assert found.by_instance == {"mp-1": HeldPrefix(2000 * 256)}


async def test_a_directory_answer_has_a_bounded_number_of_placements() -> None:
    """Beyond it nothing is made of the answer."""
    client, _ = answering(placements(20_000))
    with pytest.raises(BadResponse, match="objects and lists"):
        await client.directory_lookup(SCOPE, TOKENS)
