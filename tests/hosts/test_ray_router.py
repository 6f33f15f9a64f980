"""The router of Ray Serve in one process, without a cluster."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from kvproxy.embed.router import Router
from kvproxy.testing import simulated_engines
from tests.support.until import until

pytestmark = [pytest.mark.hosts, pytest.mark.filterwarnings("default"), pytest.mark.timeout(300)]
pytest.importorskip("ray", reason="make test-ray installs it", exc_type=ImportError)


class Replica:
    """Replica as its routers see it."""

    node_id = availability_zone = "here"
    backend_http_endpoint: tuple[str, int] | None = None

    def __init__(self, name: str, *, models: tuple[str, ...] = (), room: int = 10) -> None:
        from ray.serve._private.common import DeploymentID, ReplicaID

        self.replica_id = ReplicaID(name, DeploymentID("engine", "app"))
        self.multiplexed_model_ids = set(models)
        self.routing_stats: dict[str, Any] = {}
        self.max_ongoing_requests = room

    async def get_queue_len(self, *, deadline_s: float) -> int:
        """As of Ray Serve."""
        return 0


class Result:
    """Stream of a replica."""

    async def __anext__(self) -> str:
        return "piece"


def make_router(*replicas: Replica, **options: Any) -> Any:
    from ray.serve._private.common import DeploymentHandleSource

    from kvproxy.ray import KVCacheRouter

    made = KVCacheRouter(
        deployment_id=replicas[0].replica_id.deployment_id,
        handle_source=DeploymentHandleSource.REPLICA,
        use_replica_queue_len_cache=True,
    )
    made.initialize_state(**options)
    made.update_replicas(list(replicas))
    return made


def make_request(number: int = 0, text: str = "long beginning ", **metadata: Any) -> Any:
    from ray.serve._private.common import RequestMetadata
    from ray.serve._private.request_router.common import PendingRequest

    body = {"model": "m", "messages": [{"role": "user", "content": text * 300}]}
    return PendingRequest([body], {}, RequestMetadata(f"r{number}", f"i{number}", **metadata))


def set_bound(monkeypatch: pytest.MonkeyPatch, router: Any, name: str, value: float) -> None:
    """Set a constant of its module. Ray, once it ran in this process, has given the class's functions globals of their
    own."""
    monkeypatch.setitem(type(router)._place.__globals__, name, value)


def in_ray(*, over_client: bool = False) -> Any:
    """Return the module as it is in a process that is part of Ray."""
    client = SimpleNamespace(ray=SimpleNamespace(is_connected=lambda: over_client))
    return SimpleNamespace(is_initialized=lambda: True, util=SimpleNamespace(client=client))


def load_of(router: Any, replica: Replica) -> Any:
    return router._router.proxy.clusters["default"].members.find_named(replica.replica_id.unique_id)[0].load


def in_flight(router: Any) -> int:
    return sum(one.load.in_flight for one in router._router.proxy.clusters["default"].endpoints)


async def serve(router: Any, request: Any) -> str:
    """Have one request served as Ray Serve does; returns the replica's name."""
    replica = await router._choose_replica_for_request(request)
    router.on_send_request(replica.replica_id)
    router.on_request_routed(request, replica.replica_id, Result())
    router.on_request_completed(replica.replica_id, request.metadata.internal_request_id)
    return str(replica.replica_id.unique_id)


async def test_requests_at_once_go_each_where_its_prefix_is() -> None:
    """A replica that was chosen for one is not given to another."""
    router = make_router(*(Replica(name) for name in "abc"))
    texts = [f"{number} some beginning " for number in range(6)]
    first = [await serve(router, make_request(number, text)) for number, text in enumerate(texts)]
    requests = [make_request(10 + number, text) for number, text in enumerate(texts)]
    again = await asyncio.gather(*(serve(router, one) for one in requests))
    assert list(again) == first
    assert len(set(first)) > 1
    assert in_flight(router) == 0


async def test_the_first_piece_of_a_stream_ends_its_prefill() -> None:
    """Later pieces pass untouched."""
    replica = Replica("a")
    router = make_router(replica)
    request = make_request(is_streaming=True)
    await router._choose_replica_for_request(request)
    result = Result()
    router.on_request_routed(request, replica.replica_id, result)
    assert load_of(router, replica).pending_requests == 1
    assert await result.__anext__() == "piece"
    await until(lambda: load_of(router, replica).pending_requests == 0)
    assert in_flight(router) == 1
    assert not vars(result)


async def test_a_request_given_up_while_it_waits_is_no_load() -> None:
    full = Replica("a", room=0)
    router = make_router(full)
    waiting = asyncio.create_task(router._choose_replica_for_request(make_request()))
    await until(lambda: router._router is not None and in_flight(router) == 1)
    waiting.cancel()
    await until(lambda: in_flight(router) == 0)


async def test_of_requests_whose_end_is_never_reported_the_oldest_count_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    router = make_router(Replica("a"))
    set_bound(monkeypatch, router, "_MAX_OPEN", 2)
    for number in range(4):
        await router._choose_replica_for_request(make_request(number))
    assert in_flight(router) == 2


async def test_the_end_of_an_attempt_without_room_leaves_the_next_one() -> None:
    """Ray reports an end for the attempt that a full replica refused, perhaps after it chose again."""
    router = make_router(Replica("a"), Replica("b"))
    request = make_request()
    replica = await router._choose_replica_for_request(request)
    other = next(one for one in router._replicas_list if one is not replica)
    router.on_request_completed(other.replica_id, "i0")
    assert in_flight(router) == 1
    router.on_request_completed(replica.replica_id, "i0")
    assert in_flight(router) == 0


async def test_a_pick_whose_end_is_not_reported_counts_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """With direct streaming the ingress names a replica, and nothing of the answer is reported."""
    router = make_router(Replica("a"), Replica("b"))
    set_bound(monkeypatch, router, "_PICKED_S", 0.2)
    request = make_request()
    request.args = [SimpleNamespace(**request.args[0])]
    await anext(router._choose_replicas_with_backoff(request))
    assert in_flight(router) == 1
    await until(lambda: in_flight(router) == 0)


async def test_token_ids_of_ray_serve_llm_are_the_prompt() -> None:
    router = make_router(*(Replica(name) for name in "ab"))
    chosen = []
    for number in range(4):
        request = make_request(number, text=f"{number} ")
        request.kwargs["request_token_ids"] = list(range(2000))
        chosen.append(await serve(router, request))
    assert len(set(chosen)) == 1


async def test_a_multiplexed_model_stays_where_it_is_loaded() -> None:
    """Whatever the prefix says; and the same prompt is another one to another adapter."""
    router = make_router(Replica("a", models=("lora-1",)), Replica("b", models=("lora-2",)))
    for number, (model, replica) in enumerate([("lora-1", "a"), ("lora-2", "b")] * 2):
        assert await serve(router, make_request(number, multiplexed_model_id=model)) == replica


async def test_replicas_come_and_go() -> None:
    """Prefixes of a replica that is gone are forgotten; a new one is used at once."""
    first, second, third = Replica("a"), Replica("b"), Replica("c")
    router = make_router(first)
    assert await serve(router, make_request(0)) == "a"
    router.update_replicas([second, third])
    assert await serve(router, make_request(1)) in ("b", "c")
    assert {one.id for one in router._router.proxy.clusters["default"].endpoints} == {"b", "c"}
    router.on_replica_actor_died(second.replica_id)
    assert await serve(router, make_request(2)) == "c"


async def test_a_deployment_without_replicas_costs_nothing_and_begins_again() -> None:
    """Ray does not report that an app was deleted, and keeps its router."""
    replica = Replica("a")
    router = make_router(replica)
    request = make_request(0)
    await router._choose_replica_for_request(request)
    ended = router._router.proxy
    assert ended.status()["running"]
    router.update_replicas([])
    await router._ending
    assert not ended.status()["running"]
    router.on_request_completed(replica.replica_id, "i0")
    assert not router._open
    router.update_replicas([Replica("b")])
    assert await serve(router, make_request(1)) == "b"
    assert in_flight(router) == 0


async def test_requests_that_come_as_a_router_ends_share_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    router = make_router(Replica("a"))
    await serve(router, make_request())
    begun: list[Router] = []

    def begin(config: Any) -> Router:
        begun.append(Router(config))
        return begun[-1]

    set_bound(monkeypatch, router, "Router", begin)
    router.update_replicas([])
    router.update_replicas([Replica("b")])
    assert await asyncio.gather(*(serve(router, make_request(number)) for number in (1, 2))) == ["b", "b"]
    assert begun == [router._router]


def test_apps_and_deployments_meet_each_at_its_own_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    """However their names are put together, and whatever Ray allows in them."""
    from ray.serve._private.common import DeploymentID

    from kvproxy import ray as ours
    from kvproxy.operate.config.load import load_config

    monkeypatch.setattr(ours, "ray", in_ray())
    ids = [("c", "a-b"), ("b-c", "a"), ("c", "a b"), ("é", "a"), ("è", "a"), ("x" * 200, "a"), ("x" * 201, "a")]
    found = {ours._meet_in_ray(DeploymentID(name, app))["ray"] for name, app in ids}
    assert len(found) == len(ids)
    for name in found:
        load_config({"endpoints": ["http://a:1"], "sync": {"ray": name}})


@pytest.mark.parametrize("over_client", [True, False])
def test_drivers_over_ray_client_decide_alone(monkeypatch: pytest.MonkeyPatch, over_client: bool) -> None:
    """Ray Client's connection does not survive a call that is given up, as one is where a link ends."""
    from ray.serve._private.common import DeploymentID

    from kvproxy import ray as ours

    monkeypatch.setattr(ours, "ray", in_ray(over_client=over_client))
    assert bool(ours._meet_in_ray(DeploymentID("engine", "app"))) is not over_client


async def test_open_requests_of_a_replica_that_dies_are_no_load() -> None:
    """Ray reports the end of each once the caller has its error; those of others stay open."""
    replicas = {name: Replica(name) for name in "ab"}
    router = make_router(*replicas.values())
    chosen = {}
    for number in range(4):
        request = make_request(number, text=f"{number} some beginning ")
        chosen[f"i{number}"] = (await router._choose_replica_for_request(request)).replica_id
    assert {one.unique_id for one in chosen.values()} == {"a", "b"}
    router.on_replica_actor_died(replicas["a"].replica_id)
    for name, replica in chosen.items():
        if replica.unique_id == "a":
            router.on_request_completed(replica, name)
    left = [name for name, replica in chosen.items() if replica.unique_id == "b"]
    assert list(router._open) == left
    assert await serve(router, make_request(9)) == "b"
    assert in_flight(router) == len(left)


async def test_an_engine_is_known_by_the_address_that_its_replica_names() -> None:
    """From when the replica's stats name it."""
    replica = Replica("a")
    router = make_router(replica)
    await serve(router, make_request(0))
    async with simulated_engines(1) as endpoints:
        replica.routing_stats = {"engine_url": endpoints["sim-0"]}
        router.update_replicas([replica])
        await serve(router, make_request(1))
        (endpoint,) = router._router.proxy.clusters["default"].endpoints
        assert str(endpoint.origin) == endpoints["sim-0"]


async def test_without_a_prompt_or_a_replica_ray_decides() -> None:
    router = make_router(Replica("a"))
    request = make_request()
    request.args = ["hello"]
    assert await serve(router, request) == "a"
    assert router._router is None
    assert await router.choose_replicas([], request) == [[]]
