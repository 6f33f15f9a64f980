"""Engines and LMCache services in one call."""

from __future__ import annotations

import contextlib

import httpx

from kvproxy.lab.simulator.fleet import Fleet, FleetSettings, clone_engines
from kvproxy.lab.simulator.lmcache_chunks import CPU, WorkerSettings
from kvproxy.lab.simulator.lmcache_controller import ControllerSettings
from kvproxy.lab.simulator.lmcache_coordinator import CoordinatorSettings
from tests.lab.simulator.support import TINY
from tests.support.loopback import serve

PROMPT = list(range(600))


async def test_kv_of_one_engine_is_found_through_lmcache() -> None:
    """A prompt sent to one engine: the controller names it, the coordinator places it."""
    settings = FleetSettings(clone_engines(TINY, 2), coordinator=CoordinatorSettings())
    async with contextlib.AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(Fleet(settings))
        urls = [await stack.enter_async_context(serve(app)) for app in fleet.engines.values()]
        assert fleet.controller is not None
        assert fleet.coordinator is not None
        controller = await stack.enter_async_context(serve(fleet.controller))
        coordinator = await stack.enter_async_context(serve(fleet.coordinator))
        client = await stack.enter_async_context(httpx.AsyncClient(trust_env=False))
        await client.post(f"{urls[1]}/v1/completions", json={"prompt": PROMPT, "max_tokens": 1})
        layout = (await client.post(f"{controller}/lookup", json={"tokens": PROMPT})).json()["layout_info"]
        what = {"token_ids": PROMPT, "model_name": TINY.root}
        found = (await client.post(f"{coordinator}/directory/lookup", json=what)).json()["results"]
    assert layout == {"sim-1": [CPU, 512]}
    assert [[place["instance_id"] for place in result["placements"]] for result in found] == [["sim-1"]] * 2


async def test_services_are_optional_and_workers_may_be_given() -> None:
    """Settings of one worker are kept, the others get the default host memory."""
    given = ControllerSettings(workers=(WorkerSettings("sim-0", capacity_chunks=3),))
    fleet = Fleet(FleetSettings(clone_engines(TINY, 2), controller=given, host_chunks=7))
    assert fleet.controller is not None
    workers = fleet.controller.workers
    assert {name: worker.settings.capacity_chunks for name, worker in workers.items()} == {"sim-0": 3, "sim-1": 7}
    async with Fleet(FleetSettings(clone_engines(TINY, 1), controller=None)) as bare:
        assert (bare.controller, bare.coordinator) == (None, None)
        async with serve(bare.engines["sim-0"]) as url, httpx.AsyncClient(trust_env=False) as client:
            reply = await client.post(f"{url}/v1/completions", json={"prompt": "Hello", "max_tokens": 1})
    assert reply.status_code == 200
