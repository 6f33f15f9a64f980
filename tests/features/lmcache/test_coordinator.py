"""The coordinator client: requests, answers and refusals as the real one has them."""

from __future__ import annotations

import json
from array import array

import httpx
import pytest

from kvproxy.base.errors import BadResponse, NotSupported, Refused, UnknownInstance
from kvproxy.cache.store import ActionKind, Holder, Prefix
from kvproxy.features.lmcache.coordinator import (
    FleetUsage,
    Instance,
    InstanceUsage,
    LMCacheCoordinator,
    MemoryModule,
)
from kvproxy.features.lmcache.provider import Effect
from tests.cache.clients.support import Handler, Upstream

TOKENS = array("I", range(600))
PROMPT = Prefix(TOKENS, "models/tiny-qwen", cache_salt="tenant-a")
SENT = {"token_ids": list(TOKENS), "model_name": "models/tiny-qwen", "world_size": 1, "cache_salt": "tenant-a"}


def coordinator(handler: Handler | httpx.Response) -> tuple[LMCacheCoordinator, Upstream]:
    upstream = Upstream(handler)
    return LMCacheCoordinator(upstream.http, "http://127.0.0.1:9300"), upstream


def answering(body: object, *, status: int = 200) -> tuple[LMCacheCoordinator, Upstream]:
    return coordinator(httpx.Response(status, json=body))


async def test_directory_lookup_is_per_model_and_salt() -> None:
    """Both shape the keys."""
    key = {"chunk_hash_hex": "00ff", "model_name": "models/tiny-qwen", "kv_rank": 0}
    placement = {"instance_id": "mp-1", "incarnation": 1, "tier": "l1", "backend": "dram", "size_bytes": 9}
    client, upstream = answering({"chunks": 2, "results": [{"key": key, "placements": [placement]}]})
    assert await client.lookup(PROMPT) == [Holder("mp-1", 256, True)]
    assert upstream.body == SENT


@pytest.mark.parametrize("tier", ["gpu", 5, None])
async def test_a_tier_nobody_knows_is_a_bad_response(tier: object) -> None:
    """Nothing is guessed into a match."""
    results = [{"key": {"chunk_hash_hex": "0"}, "placements": [{"instance_id": "a", "tier": tier}]}]
    with pytest.raises(BadResponse):
        await answering({"chunks": 1, "results": results})[0].lookup(PROMPT)


async def test_instances() -> None:
    """Registered servers, and where others read their memory."""
    row = {
        "instance_id": "mp-1",
        "ip": "127.0.0.1",
        "http_port": 8080,
        "registration_time": 1.0,
        "metadata": {"a": "b"},
    }
    client, _ = answering({"instances": [row, {"instance_id": "mp-2", "p2p_advertised_url": "http://p2p"}]})
    assert await client.list_instances() == (
        Instance("mp-1"),
        Instance("mp-2", "http://p2p"),
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
    expected = InstanceUsage("mp/1", (MemoryModule("l1", "dram", 5, 10, 0.5),))
    client, _ = answering({"instances": [one], "shared_modules": []})
    assert await client.fetch_usage() == FleetUsage((expected,))


async def test_pins_are_added_and_removed() -> None:
    """Unlike the controller's they can be taken back."""
    client, upstream = answering({"requested": 2, "affected": 4, "status": "pinned"})
    assert await client.act(ActionKind.PIN, "mp-1", PROMPT) == Effect(4)
    assert await client.act(ActionKind.UNPIN, "mp-1", PROMPT) == Effect(4)
    assert [(request.method, json.loads(request.content)) for request in upstream.requests] == [
        ("POST", SENT),
        ("DELETE", SENT),
    ]


async def test_delete_names_instance_tier_and_force() -> None:
    """One server, L1 by default."""
    client, upstream = answering(
        {"instance_id": "mp-1", "requested": 2, "affected": 1, "skipped": 1, "status": "deleted"}
    )
    assert await client.act(ActionKind.EVICT, "mp-1", PROMPT) == Effect(1)
    assert upstream.body == {**SENT, "instance_id": "mp-1", "tier": "l1", "force": False}


async def test_a_prefetch_is_submitted_and_polled() -> None:
    """A completed job is forgotten by the server; an id may hold a slash."""

    async def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "POST":
            submitted = {"instance_id": "mp-1", "request_id": "r/1", "chunks": 2, "status": "submitted"}
            return httpx.Response(200, json=submitted)
        pending = len(upstream.requests) < 3
        return httpx.Response(200, json={"status": "pending"} if pending else {"status": "completed", "found_keys": 2})

    client, upstream = coordinator(answer)
    assert await client.act(ActionKind.TRANSFER, "mp-1", PROMPT) == Effect(512)
    assert json.loads(upstream.requests[0].content) == {**SENT, "instance_id": "mp-1"}
    assert [one.url.raw_path for one in upstream.requests[1:]] == 2 * [b"/cache/prefetches/mp-1/r%2F1"]


async def test_stats() -> None:
    """Size of the directory."""
    stats = {"num_keys": 4, "num_placements": 8, "l1_keys_by_instance": {"mp-1": 4}, "l1_size_bytes": 9}
    assert await answering(stats)[0].indexed_chunks() == 4


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
        client.lookup(PROMPT),
        client.act(ActionKind.PIN, "mp-9", PROMPT),
        client.act(ActionKind.TRANSFER, "mp-9", PROMPT),
    ):
        with pytest.raises(Refused) as refused:
            await call
        assert type(refused.value) is kind


async def test_a_plain_text_500() -> None:
    """The real one sends it for a request that it cannot handle."""
    client, _ = coordinator(httpx.Response(500, text="Internal Server Error"))
    with pytest.raises(Refused, match="500"):
        await client.lookup(PROMPT)


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
    found = await client.lookup(Prefix(array("I", range(2000 * 256)), "m"))
    assert found == [Holder("mp-1", 2000 * 256, True)]


async def test_a_directory_answer_has_a_bounded_number_of_placements() -> None:
    """Beyond it nothing is made of the answer."""
    client, _ = answering(placements(20_000))
    with pytest.raises(BadResponse, match="objects and lists"):
        await client.lookup(PROMPT)
