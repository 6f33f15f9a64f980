"""The simulated LMCache coordinator."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from kvproxy.lab.simulator.lmcache_coordinator import (
    CoordinatorApp,
    CoordinatorSettings,
)
from tests.support.clock import FakeClock
from tests.support.loopback import serve

TOKENS = list(range(1024))
WHAT = {"model_name": "m", "world_size": 1, "token_ids": TOKENS}


class Coordinator:
    """A served coordinator and a client of it."""

    def __init__(self, app: CoordinatorApp, client: httpx.AsyncClient) -> None:
        self.app = app
        self.client = client

    async def call(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Status and JSON of one call."""
        reply = await self.client.request(method, path, json=body)
        return reply.status_code, reply.json() if reply.content else None

    async def find_holders(self, tokens: list[int] = TOKENS, **what: Any) -> list[list[str]]:
        """Return the holders of each chunk."""
        body = {"token_ids": tokens, "model_name": "m", **what}
        status, answer = await self.call("POST", "/directory/lookup", body)
        assert status == 200
        return [[place["instance_id"] for place in result["placements"]] for result in answer["results"]]


@contextlib.asynccontextmanager
async def coordinator(clock: FakeClock | None = None, **settings: Any) -> AsyncIterator[Coordinator]:
    """Yield a coordinator with mp-1 and mp-2."""
    chosen = CoordinatorSettings(**{"instances": ("mp-1", "mp-2"), **settings})
    app = CoordinatorApp(chosen, clock=clock or FakeClock())
    async with serve(app, drain_s=1) as url, httpx.AsyncClient(base_url=url, trust_env=False) as client:
        yield Coordinator(app, client)


async def test_all_holders_of_every_chunk() -> None:
    """A capture of the real one: A on mp-1, its first 600 tokens on mp-2 too."""
    async with coordinator() as running:
        running.app.admit("mp-1", TOKENS, model_name="m")
        running.app.admit("mp-2", TOKENS[:600], model_name="m")
        assert await running.find_holders() == [["mp-1", "mp-2"], ["mp-1", "mp-2"], ["mp-1"], ["mp-1"]]
        assert await running.find_holders(list(range(9000, 9600))) == [[], []]


async def test_model_and_salt_are_part_of_the_key() -> None:
    """Another model or tenant shares nothing; ranks multiply the results."""
    async with coordinator() as running:
        running.app.admit("mp-1", TOKENS[:256], model_name="m")
        assert await running.find_holders(TOKENS[:256], model_name="other") == [[]]
        assert await running.find_holders(TOKENS[:256], cache_salt="t") == [[]]
        assert await running.find_holders(TOKENS[:256], world_size=2) == [["mp-1"], []]


async def test_the_shape_of_a_lookup() -> None:
    """Keys and placements as the OpenAPI names them."""
    async with coordinator() as running:
        running.app.admit("mp-1", TOKENS[:256], model_name="m")
        _, by_tokens = await running.call("POST", "/directory/lookup", {"token_ids": TOKENS[:256], "model_name": "m"})
    key = by_tokens["results"][0]["key"]
    assert by_tokens["chunks"] == 1
    assert set(key) == {"chunk_hash_hex", "model_name", "kv_rank", "object_group_id", "cache_salt"}
    assert set(by_tokens["results"][0]) == {"key", "placements", "token_ids", "access_count"}
    place = by_tokens["results"][0]["placements"][0]
    assert set(place) == {"instance_id", "incarnation", "tier", "backend", "size_bytes", "shared"}


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({}, 422),
        ({"token_ids": TOKENS}, 422),
        ({"token_ids": TOKENS, "model_name": "m", "keys": [{}]}, 422),
        ({"token_ids": TOKENS, "model_name": "a@b"}, 400),
        ({"token_ids": [-1], "model_name": "m"}, 500),
    ],
)
async def test_refused_lookups(body: dict[str, Any], status: int) -> None:
    """Neither or both forms, a forbidden model name, negative tokens."""
    async with coordinator() as running:
        assert (await running.call("POST", "/directory/lookup", body))[0] == status


async def test_too_many_tokens_are_refused() -> None:
    """A million tokens is the cap."""
    async with coordinator() as running:
        many = {"token_ids": [0] * 1_000_001, "model_name": "m"}
        assert (await running.call("POST", "/directory/lookup", many))[0] == 400


async def test_usage_is_a_pressure_signal() -> None:
    """Bytes used of bytes there are, by instance."""
    async with coordinator(capacity_chunks=8, chunk_bytes=10) as running:
        running.app.admit("mp-1", TOKENS, model_name="m")
        _, fleet = await running.call("GET", "/instances/usage")
    one = fleet["instances"][0]
    assert (one["modules"][0]["used_bytes"], one["modules"][0]["usage_ratio"]) == (40, 0.5)
    assert [instance["instance_id"] for instance in fleet["instances"]] == ["mp-1", "mp-2"]


async def test_a_full_server_forgets_the_oldest() -> None:
    """Bounded memory: the directory shows what is left."""
    async with coordinator(capacity_chunks=4) as running:
        running.app.admit("mp-1", TOKENS, model_name="m")
        running.app.admit("mp-1", list(range(2000, 2512)), model_name="m")
        assert await running.find_holders() == [[], [], ["mp-1"], ["mp-1"]]
        assert (await running.call("GET", "/directory/stats"))[1]["l1_keys_by_instance"] == {"mp-1": 4, "mp-2": 0}


async def test_pins_are_counted() -> None:
    """Two pins need two unpins."""
    async with coordinator() as running:
        for _ in range(2):
            assert (await running.call("POST", "/cache/pins", WHAT))[1] == {
                "requested": 4,
                "affected": 4,
                "status": "pinned",
            }
        await running.call("DELETE", "/cache/pins", WHAT)
        assert (await running.call("GET", "/sim/state"))[1]["pins"] == 4
        assert (await running.call("DELETE", "/cache/pins", WHAT))[1]["affected"] == 4
        assert (await running.call("DELETE", "/cache/pins", WHAT))[1]["affected"] == 0


async def test_delete_on_one_server() -> None:
    """404 unknown, 502 down; tier "all" deletes and yet says 502, since there is no second tier."""
    async with coordinator() as running:
        for name in ("mp-1", "mp-2"):
            running.app.admit(name, TOKENS, model_name="m")
        delete = {**WHAT, "instance_id": "mp-1", "tier": "l1"}
        assert (await running.call("POST", "/cache/delete", {**delete, "instance_id": "nobody"}))[0] == 404
        server = running.app.directory.get("mp-1")
        assert server is not None
        server.down = True
        assert (await running.call("POST", "/cache/delete", delete))[0] == 502
        assert await running.find_holders() == [["mp-1", "mp-2"]] * 4
        server.down = False
        assert (await running.call("POST", "/cache/delete", {**delete, "tier": "l2"}))[1]["status"] == "noop"
        _, answer = await running.call("POST", "/cache/delete", delete)
        assert (answer["requested"], answer["affected"], answer["status"]) == (4, 4, "deleted")
        assert (await running.call("POST", "/cache/delete", {**delete, "instance_id": "mp-2", "tier": "all"}))[0] == 502
        assert await running.find_holders() == [[]] * 4


async def test_prefetch_warms_a_server_from_the_others() -> None:
    """Submitted, completed once, then unknown; less than a chunk is a no-op; unasked results are kept in a bound."""
    async with coordinator(kept_prefetches=2) as running:
        running.app.admit("mp-1", TOKENS[:512], model_name="m")
        body = {**WHAT, "instance_id": "mp-2"}
        _, job = await running.call("POST", "/cache/prefetches", body)
        assert (job["status"], job["chunks"]) == ("submitted", 4)
        path = f"/cache/prefetches/mp-2/{job['request_id']}"
        assert (await running.call("GET", path))[1]["status"] == "completed"
        assert (await running.call("GET", path))[0] == 404
        assert await running.find_holders() == [["mp-1", "mp-2"], ["mp-1", "mp-2"], [], []]
        short = {**body, "token_ids": TOKENS[:10]}
        assert (await running.call("POST", "/cache/prefetches", short))[1]["status"] == "noop"
        jobs = [(await running.call("POST", "/cache/prefetches", body))[1]["request_id"] for _ in range(3)]
        polled = [(await running.call("GET", f"/cache/prefetches/mp-2/{job}"))[0] for job in jobs]
        assert polled == [404, 200, 200]


async def test_a_store_that_all_servers_read() -> None:
    """Chunks stored by one are in its memory and, under its id, in the store; a prefetch takes them from there, in its
    time, and only the beginning; the store goes on without the memory."""
    clock = FakeClock()
    async with coordinator(clock, shared_chunks=3, prefetch_s=1.0) as running:
        running.app.admit("mp-1", TOKENS[:768], model_name="m")
        _, found = await running.call("POST", "/directory/lookup", {"token_ids": TOKENS, "model_name": "m"})
        places = [[(one["tier"], one["shared"]) for one in each["placements"]] for each in found["results"]]
        assert places == [[("l1", False), ("l2", True)]] * 3 + [[]]
        assert await running.find_holders() == [["mp-1", "mp-1"]] * 3 + [[]]
        assert (await running.call("GET", "/directory/stats"))[1]["l2_count"] == 3
        _, job = await running.call("POST", "/cache/prefetches", {**WHAT, "instance_id": "mp-2"})
        path = f"/cache/prefetches/mp-2/{job['request_id']}"
        assert (await running.call("GET", path))[1]["status"] == "pending"
        clock.advance(1.0)
        _, over = await running.call("GET", path)
        assert (over["status"], over["found_keys"], over["total_keys"]) == ("completed", 3, 4)
        gone = {**WHAT, "instance_id": "mp-1", "tier": "l2"}
        assert (await running.call("POST", "/cache/delete", gone))[1]["affected"] == 3
        assert await running.find_holders() == [["mp-1", "mp-2"]] * 3 + [[]]
        assert len((await running.call("GET", "/instances/usage"))[1]["shared_modules"]) == 1


async def test_the_controllers_routes_are_not_here() -> None:
    """By which a client distinguishes the two."""
    async with coordinator() as running:
        assert (await running.call("POST", "/lookup", {"tokens": TOKENS}))[0] == 404


async def test_the_chunk_size_is_the_fleets() -> None:
    """Stored and looked up alike; a prompt shorter than a chunk has none."""
    async with coordinator(chunk_tokens=512) as running:
        running.app.admit("mp-1", TOKENS, model_name="m")
        assert await running.find_holders() == [["mp-1"], ["mp-1"]]
        assert await running.find_holders(TOKENS[:511]) == []
        _, pinned = await running.call("POST", "/cache/pins", WHAT)
        assert pinned["affected"] == 2
