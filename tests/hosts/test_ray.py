"""Ray Serve with replicas chosen by cache."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

pytestmark = [pytest.mark.hosts, pytest.mark.filterwarnings("default"), pytest.mark.timeout(300)]
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S"] = "10"  # a busy machine: Ray would take another replica
ray = pytest.importorskip("ray", reason="make test-hosts installs it", exc_type=ImportError)


def body(session: int, turn: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"{session} " + "long beginning " * 300}]
    return {"model": "m", "messages": messages + [{"role": "user", "content": "go on"}] * turn}


@pytest.fixture(scope="module")
def handle() -> Iterator[Any]:
    """Yield a deployment of three replicas that answer with their own id."""
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=200_000_000)

    async def answer(_: Any) -> str:
        return str(serve.get_replica_context().replica_id.unique_id)

    class Engine:
        async def __call__(self, given: Any) -> str:
            if given == "die":
                os._exit(1)
            return await answer(given)

    deployment = serve.deployment(
        num_replicas=3,
        ray_actor_options={"num_cpus": 0.1},
        request_router_config=RequestRouterConfig(request_router_class="kvproxy.ray:KVCacheRouter"),
    )(Engine)
    yield serve.run(deployment.bind(), route_prefix=None)
    serve.shutdown()
    ray.shutdown()


def test_a_session_stays_on_its_replica_and_sessions_spread(handle: Any) -> None:
    async def ask() -> list[set[str]]:
        return [{await handle.remote(body(session, turn)) for turn in range(4)} for session in range(6)]

    found = asyncio.run(ask())
    assert all(len(replicas) == 1 for replicas in found)
    assert len(set.union(*found)) > 1


def test_prompts_at_once_use_every_replica(handle: Any) -> None:
    async def ask() -> Counter[str]:
        return Counter(await asyncio.gather(*(handle.remote(body(session, 0)) for session in range(10, 70))))

    assert len(asyncio.run(ask())) == 3


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
