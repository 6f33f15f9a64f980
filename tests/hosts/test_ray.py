"""Ray Serve with replicas chosen by cache."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.ray_node import start_ray
from tests.support.until import until

pytestmark = [pytest.mark.hosts, pytest.mark.filterwarnings("default"), pytest.mark.timeout(400)]
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S"] = "10"  # a busy machine: Ray would take another replica
ray = pytest.importorskip("ray", reason="make test-hosts installs it", exc_type=ImportError)


def body(session: int, turn: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"{session} " + "long beginning " * 300}]
    return {"model": "m", "messages": messages + [{"role": "user", "content": "go on"}] * turn}


def start(name: str, **options: Any) -> Any:
    """Return the handle of a deployment whose replicas answer with their own id, at once or in two pieces."""
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    def own_id() -> str:
        return str(serve.get_replica_context().replica_id.unique_id)

    class Engine:
        async def __call__(self, given: Any) -> str:
            if given == "die":
                os._exit(1)
            return own_id()

        async def stream(self, given: Any) -> AsyncIterator[str]:
            """Stop in the middle until there is a file of this name."""
            yield own_id()
            while not os.path.exists(given["until"]):  # noqa: ASYNC110, ASYNC240 - another process makes it
                await asyncio.sleep(0.02)
            yield own_id()

    deployment = serve.deployment(
        name=name,
        ray_actor_options={"num_cpus": 0.1},
        request_router_config=RequestRouterConfig(request_router_class="kvproxy.ray:KVCacheRouter"),
        **options,
    )(Engine)
    return serve.run(deployment.bind(), name=name, route_prefix=None)


@pytest.fixture(scope="module")
def running() -> Iterator[None]:
    """Keep Ray up."""
    from ray import serve

    start_ray()
    yield
    serve.shutdown()
    ray.shutdown()


@pytest.fixture(scope="module")
def handle(running: None) -> Any:
    """Yield a deployment of three replicas."""
    return start("three", num_replicas=3)


def router_of(name: str) -> Any:
    """Return the router of this deployment, which lives in a thread of Ray's."""
    routers = [each for each in gc.get_objects() if type(each).__name__ == "KVCacheRouter"]  # Ray may copy the class
    (router,) = [one for one in routers if one._deployment_id.name == name and one._router is not None]
    return router


def in_flight(name: str) -> dict[str, int]:
    """Return the requests that count at each replica."""
    endpoints = router_of(name)._router.proxy.clusters["default"].endpoints
    return {one.id: one.load.in_flight for one in endpoints}


def placed_blocks(router: Any) -> int:
    """Return how many blocks of prompts a router knows as placed."""
    kvcache = router._router.proxy.kvcache
    return int(kvcache.overlap.indexes["default"].approximate.counts.entries)


async def read(stream: Any) -> list[str]:
    """Return the pieces up to the end, or to the death of the replica."""
    pieces: list[str] = []
    with contextlib.suppress(ray.exceptions.RayActorError):
        async for piece in stream:
            pieces += [piece]
    return pieces


def test_a_session_stays_on_its_replica_and_sessions_spread(handle: Any) -> None:
    async def turn(session: int, number: int) -> str:
        replica = str(await handle.remote(body(session, number)))
        await until(lambda: not any(in_flight("three").values()))  # Ray reports the end of a request after its answer
        return replica

    async def ask() -> list[set[str]]:
        return [{await turn(session, number) for number in range(4)} for session in range(6)]

    found = asyncio.run(ask())
    assert all(len(replicas) == 1 for replicas in found)
    assert len(set.union(*found)) > 1


def test_prompts_at_once_use_every_replica(handle: Any) -> None:
    async def ask() -> Counter[str]:
        return Counter(await asyncio.gather(*(handle.remote(body(session, 0)) for session in range(10, 70))))

    assert len(asyncio.run(ask())) == 3


def test_ingresses_decide_as_one(handle: Any) -> None:
    """A session whose first turn one of them placed is sent to its replica by another process."""

    @ray.remote(num_cpus=0.1)
    class Ingress:
        def __init__(self) -> None:
            from ray import serve

            self.handle = serve.get_app_handle("three")

        async def ask(self, given: Any) -> str:
            return str(await self.handle.remote(given))

        async def wait_for(self, blocks: int) -> None:
            """Return as soon as it knows that so many were placed."""
            from tests.hosts.test_ray import placed_blocks, router_of

            router = router_of("three")
            await until(lambda: placed_blocks(router) >= blocks)

    other = Ingress.remote()  # type: ignore[attr-defined]

    async def ask() -> None:
        await other.ask.remote(body(600, 0))  # its router begins with its first request
        for session in range(601, 609):
            replica = await handle.remote(body(session, 0))
            await until(lambda: not any(in_flight("three").values()))
            await other.wait_for.remote(placed_blocks(router_of("three")))
            assert await other.ask.remote(body(session, 1)) == replica

    asyncio.run(ask())
    ray.kill(other)


def test_a_request_without_a_prompt_is_served(handle: Any) -> None:
    async def ask() -> str:
        return str(await handle.remote("hello"))

    assert asyncio.run(ask())


def test_a_replica_that_dies_is_not_chosen_any_more(handle: Any) -> None:
    """Requests go on while Ray starts another."""

    async def ask() -> set[str]:
        with contextlib.suppress(ray.exceptions.RayActorError):
            await handle.remote("die")
        return {await handle.remote(body(session, 0)) for session in range(100, 110)}

    assert asyncio.run(ask())


def test_open_streams_of_a_replica_that_dies_break_off_and_the_others_end_whole(handle: Any, tmp_path: Path) -> None:
    """Nothing counts at any replica in the end."""
    until_there = tmp_path / "go on"

    async def ask() -> list[list[str]]:
        streams = [
            handle.options(stream=True, method_name="stream").remote({**body(session, 0), "until": str(until_there)})
            for session in range(200, 212)
        ]
        first = [await anext(aiter(stream)) for stream in streams]
        with contextlib.suppress(ray.exceptions.RayActorError):
            await handle.remote("die")
        until_there.touch()
        rest = await asyncio.gather(*(read(stream) for stream in streams))
        await until(lambda: not any(in_flight("three").values()))
        return [[one, *more] for one, more in zip(first, rest, strict=True)]

    found = asyncio.run(ask())
    broken = [pieces for pieces in found if len(pieces) == 1]
    assert all(pieces == pieces[:1] * 2 for pieces in found if pieces not in broken)
    assert len({pieces[0] for pieces in broken}) == 1  # the replica that died
    assert len(broken) < len(found)


def test_replicas_of_rays_autoscaling_are_used_when_they_come_and_left_when_they_go(
    running: None, tmp_path: Path
) -> None:
    scaling = {
        "min_replicas": 1,
        "max_replicas": 2,
        "target_ongoing_requests": 1,
        "upscale_delay_s": 0.1,
        "downscale_delay_s": 0.5,
        "metrics_interval_s": 0.2,
        "look_back_period_s": 0.5,
    }
    handle = start("scaled", autoscaling_config=scaling)
    until_there = tmp_path / "go on"

    async def ask() -> None:
        bodies = [{**body(300 + session, 0), "until": str(until_there)} for session in range(4)]
        held = [handle.options(stream=True, method_name="stream").remote(each) for each in bodies]
        (first,) = {await anext(aiter(each)) for each in held}
        await until(lambda: len(router_of("scaled").curr_replicas) == 2, within_s=120)
        used = set(await asyncio.gather(*(handle.remote(body(session, 0)) for session in range(400, 420))))
        assert len(used | {first}) == 2
        until_there.touch()
        await asyncio.gather(*map(read, held))
        await until(lambda: len(router_of("scaled").curr_replicas) == 1, within_s=120)
        left = await handle.remote(body(500, 0))
        assert left in used | {first}
        assert in_flight("scaled").keys() == {left}

    asyncio.run(ask())
