"""The simulated LMCache controller, checked against what the real one was seen to do."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from kvproxy.lab.simulator.lmcache_chunks import CPU, DISK, WRONG_STATE, WorkerSettings, hash_chunks
from kvproxy.lab.simulator.lmcache_controller import ControllerApp, ControllerSettings
from tests.support.clock import FakeClock
from tests.support.loopback import serve

TOKENS = list(range(1024))
OTHER = list(range(5000, 6024))


class Controller:
    """A served controller and a client of it."""

    def __init__(self, app: ControllerApp, client: httpx.AsyncClient) -> None:
        self.app = app
        self.client = client

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        """Status and JSON of one call."""
        reply = await self.client.post(path, json=body)
        return reply.status_code, reply.json()

    async def tokens(self, path: str, **body: Any) -> int:
        """num_tokens of one action."""
        status, answer = await self.post(path, body)
        assert status == 200, answer
        assert set(answer) == {"event_id", "num_tokens"}
        count: int = answer["num_tokens"]
        return count

    async def find_layout(self, tokens: list[int]) -> Any:
        """layout_info of a lookup."""
        return (await self.post("/lookup", {"tokens": tokens}))[1]["layout_info"]


@contextlib.asynccontextmanager
async def controller(
    *workers: WorkerSettings, clock: FakeClock | None = None, **settings: Any
) -> AsyncIterator[Controller]:
    """Yield a controller with workers a and b unless told otherwise."""
    chosen = workers or (WorkerSettings("a"), WorkerSettings("b"))
    app = ControllerApp(ControllerSettings(chosen, **settings), clock=clock or FakeClock())
    async with serve(app, drain_s=1) as url, httpx.AsyncClient(base_url=url, trust_env=False) as client:
        yield Controller(app, client)


async def admit(running: Controller, instance_id: str, tokens: list[int], location: str = CPU) -> None:
    """Report a store by an engine."""
    running.app.workers[instance_id].admit(tokens, location)


async def test_lookup_answers_with_arrays() -> None:
    """The true shape: [location, matched tokens]."""
    async with controller() as running:
        await admit(running, "a", TOKENS)
        status, body = await running.post("/lookup", {"tokens": TOKENS})
    assert status == 200
    assert body["layout_info"] == {"a": [CPU, 1024]}
    assert body["event_id"].startswith("Lookup")


async def test_pixiu_shape_has_objects_and_an_evict() -> None:
    """The switch for what Dubbo-go-Pixiu believes in."""
    async with controller(pixiu_shape=True) as running:
        await admit(running, "a", TOKENS)
        assert await running.find_layout(TOKENS) == {"a": {"0": CPU, "1": 1024}}
        assert await running.tokens("/evict", tokens=TOKENS, instance_id="a") == 1024
        assert await running.find_layout(TOKENS) == {}


async def test_there_is_no_evict() -> None:
    """404 in FastAPI's words, in every version."""
    async with controller() as running:
        assert await running.post("/evict", {"tokens": TOKENS, "instance_id": "a"}) == (404, {"detail": "Not Found"})


@pytest.mark.parametrize("tokens", [[], TOKENS[:255], OTHER])
async def test_nothing_matches_below_a_chunk(tokens: list[int]) -> None:
    """Only full chunks of 256 tokens are known."""
    async with controller() as running:
        await admit(running, "a", TOKENS)
        assert await running.find_layout(tokens) == {}


async def test_replicas_are_invisible() -> None:
    """Two full holders: only the first registered one is named."""
    async with controller() as running:
        for name in ("b", "a"):
            await admit(running, name, TOKENS)
        assert await running.find_layout(TOKENS) == {"a": [CPU, 1024]}


async def test_the_number_is_no_contiguous_prefix() -> None:
    """b holds the first chunk, a the later ones: a is credited with 1024 although it can serve nothing."""
    async with controller() as running:
        await admit(running, "b", TOKENS[:256])
        await admit(running, "a", TOKENS)
        store = running.app.workers["a"].stores[CPU]
        store.remove(running.app.workers["b"].stores[CPU].held_prefix(hash_chunks(TOKENS)))
        layout = await running.find_layout(TOKENS)
    assert layout == {"b": [CPU, 256], "a": [CPU, 1024]}
    assert list(layout) == ["b", "a"]


async def test_pin_protects_until_its_lease_lapses() -> None:
    """Pinned chunks survive a clear; after the time-out they do not."""
    clock = FakeClock()
    async with controller(WorkerSettings("a", pin_s=300.0), clock=clock) as running:
        await admit(running, "a", TOKENS)
        assert await running.tokens("/pin", tokens=TOKENS[:512], instance_id="a", location=CPU) == 512
        assert await running.tokens("/clear", instance_id="a", location=CPU) == 512
        assert (await running.client.get("/sim/state")).json()["workers"]["a"]["pinned"][CPU] == 2
        clock.advance(301.0)
        assert await running.tokens("/clear", instance_id="a", location=CPU) == 512
        assert await running.find_layout(TOKENS) == {}


async def test_a_wrong_location_is_no_error() -> None:
    """200 and 0 tokens: the status says nothing."""
    async with controller() as running:
        await admit(running, "a", TOKENS)
        assert await running.tokens("/pin", tokens=TOKENS, instance_id="a", location="lmcache") == 0
        assert await running.tokens("/pin", tokens=TOKENS, instance_id="a", location=DISK) == 0
        assert await running.tokens("/clear", instance_id="a", location="lmcache") == 0


async def test_a_full_store_evicts_the_oldest_unpinned() -> None:
    """Leased chunks stay, the rest goes in order of use; without room nothing more is stored."""
    async with controller(WorkerSettings("a", capacity_chunks=4)) as running:
        await admit(running, "a", TOKENS)
        await running.tokens("/pin", tokens=TOKENS[:512], instance_id="a", location=CPU)
        await admit(running, "a", OTHER)
        assert await running.find_layout(TOKENS) == {"a": [CPU, 512]}
        stats = (await running.client.get("/controller/key-stats")).json()
    assert stats["instances"] == [{"instance_id": "a", "key_count": 4, "worker_count": 1}]
    assert stats["total_key_count"] == 4


async def test_a_store_full_of_leases_refuses() -> None:
    """Everything pinned: nothing new is kept."""
    async with controller(WorkerSettings("a", capacity_chunks=4)) as running:
        await admit(running, "a", TOKENS)
        await running.tokens("/pin", tokens=TOKENS, instance_id="a", location=CPU)
        await admit(running, "a", OTHER)
        assert await running.find_layout(OTHER) == {}


async def test_only_cachegen_compresses_and_in_place() -> None:
    """zstd: 200 and 0. CacheGen: the prefix, still held; decompress gives it back once."""
    async with controller() as running:
        await admit(running, "a", TOKENS)
        where = {"tokens": TOKENS, "instance_id": "a", "location": CPU}
        assert await running.tokens("/compress", method="zstd", **where) == 0
        assert await running.tokens("/compress", method="cachegen", **{**where, "tokens": None}) == 0
        assert await running.tokens("/compress", method="cachegen", **{**where, "location": "x"}) == 0
        assert await running.tokens("/compress", method="cachegen", **where) == 1024
        assert await running.find_layout(TOKENS) == {"a": [CPU, 1024]}
        assert await running.tokens("/decompress", method="cachegen", **where) == 1024
        assert await running.tokens("/decompress", method="cachegen", **where) == 0


@pytest.mark.parametrize(
    ("path", "text"),
    [("/compress", "Operation 'compress' is not supported."), ("/decompress", "")],
)
async def test_models_cachegen_does_not_know(path: str, text: str) -> None:
    """500 with a misleading text; decompress always with an empty one."""
    async with controller(WorkerSettings("a", cachegen=False)) as running:
        await admit(running, "a", TOKENS)
        body = {"tokens": TOKENS, "instance_id": "a", "location": CPU, "method": "cachegen"}
        assert await running.post(path, body) == (500, {"detail": text})


@pytest.mark.parametrize(
    ("path", "verb"),
    [("/pin", "pinned"), ("/clear", "cleared"), ("/compress", "compressed"), ("/move", "moved"), ("/decompress", "")],
)
async def test_unknown_instances(path: str, verb: str) -> None:
    """The text of a failed agreement among no workers."""
    where = {"tokens": TOKENS, "instance_id": "nobody", "location": CPU, "method": "cachegen"}
    where |= {"old_position": ["nobody", CPU], "new_position": ["a", CPU]}
    text = f"The number of tokens {verb} should be the same across all workers." if verb else ""
    async with controller() as running:
        assert await running.post(path, where) == (500, {"detail": text})


async def test_move_needs_p2p() -> None:
    """Without it a 500 that names both ends; with it the chunks go over, or are copied."""
    body = {"old_position": ["a", CPU], "new_position": ["b", CPU], "tokens": TOKENS}
    async with controller() as running:
        status, answer = await running.post("/move", body)
        assert status == 500
        assert answer["detail"].endswith("or P2P is not enabled.")
        assert (await running.post("/move", {**body, "old_position": ["a", "nowhere"]}))[0] == 500
    async with controller(WorkerSettings("a", p2p=True), WorkerSettings("b", p2p=True)) as running:
        await admit(running, "a", TOKENS)
        assert await running.tokens("/move", **body, should_copy=True) == 1024
        assert await running.find_layout(TOKENS) == {"a": [CPU, 1024]}
        assert await running.tokens("/move", **body) == 1024
        assert await running.find_layout(TOKENS) == {"b": [CPU, 1024]}


async def test_parallel_control_calls_break_each_other() -> None:
    """One unlocked socket a worker: of calls at the same time one succeeds, the others hit the wrong state."""
    async with controller(WorkerSettings("a", control_s=0.05), WorkerSettings("b")) as running:
        await admit(running, "a", TOKENS)
        pin = {"tokens": TOKENS, "instance_id": "a", "location": CPU}
        answers = await asyncio.gather(*(running.post("/pin", pin) for _ in range(3)))
        assert sorted(status for status, _ in answers) == [200, 500, 500]
        assert {body["detail"] for status, body in answers if status == 500} == {WRONG_STATE}
        assert (await running.post("/pin", pin))[0] == 200


async def test_a_dead_worker_hangs_the_first_call_and_breaks_the_rest() -> None:
    """LookupClient still name it; when it is back, the hung call ends and the socket works."""
    async with controller() as running:
        await admit(running, "a", TOKENS)
        running.app.workers["a"].kill()
        pin = {"tokens": TOKENS, "instance_id": "a", "location": CPU}
        hung = asyncio.create_task(running.post("/pin", pin))
        while not (await running.client.get("/sim/state")).json()["calls"].get("POST /pin"):
            continue
        clear = {"instance_id": "a", "location": CPU}
        assert await running.post("/clear", clear) == (500, {"detail": WRONG_STATE})
        assert await running.find_layout(TOKENS) == {"a": [CPU, 1024]}
        assert not hung.done()
        running.app.workers["a"].revive()
        assert (await hung)[1]["num_tokens"] == 1024
        assert (await running.post("/clear", clear))[0] == 200


async def test_giving_up_on_a_dead_worker_does_not_free_its_socket() -> None:
    """A client time-out leaves the controller stuck until the worker is back."""
    async with controller() as running:
        running.app.workers["a"].kill()
        async with httpx.AsyncClient(base_url=str(running.client.base_url), trust_env=False, timeout=0.05) as hasty:
            with pytest.raises(httpx.ReadTimeout):
                await hasty.post("/clear", json={"instance_id": "a", "location": CPU})
        assert (await running.post("/clear", {"instance_id": "a", "location": CPU}))[1] == {"detail": WRONG_STATE}


async def test_missing_fields_echo_the_body() -> None:
    """422 in FastAPI's shape; `input` holds everything that was sent."""
    async with controller() as running:
        status, body = await running.post("/pin", {"tokens": TOKENS})
    assert status == 422
    assert [problem["loc"] for problem in body["detail"]] == [["body", "instance_id"], ["body", "location"]]
    assert body["detail"][0]["input"] == {"tokens": TOKENS}
    assert body["detail"][0]["type"] == "missing"


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"tokens": "x"}, "list_type"),
        ({"tokens": ["x"]}, "int_parsing"),
        ([1], "model_type"),
    ],
)
async def test_fields_of_the_wrong_type(body: Any, kind: str) -> None:
    """Named by type and place."""
    async with controller() as running:
        status, answer = await running.post("/lookup", body)
    assert (status, answer["detail"][0]["type"]) == (422, kind)


async def test_bad_json() -> None:
    """422 as well."""
    async with controller() as running:
        reply = await running.client.post("/lookup", content="{")
    assert reply.status_code == 422


async def test_dashboard_reads() -> None:
    """GET /health does not exist; strangers' paths are counted within a bound."""
    async with controller() as running:
        get = running.client.get
        assert (await get("/controller/key-stats")).json()["total_worker_count"] == 2
        assert (await get("/health")).status_code == 404
        for number in range(120):
            await get(f"/nothing/{number}")
        assert len(running.app.calls) <= 101


async def test_registering_again_forgets_the_keys() -> None:
    """A restarted worker starts empty; a new one is added at the end."""
    async with controller() as running:
        await admit(running, "a", TOKENS)
        running.app.register(WorkerSettings("a"))
        assert await running.find_layout(TOKENS) == {}
        running.app.register(WorkerSettings("c"))
        assert list(running.app.workers) == ["a", "b", "c"]
