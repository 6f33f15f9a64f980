"""Replicas that meet at an actor of Ray; here it runs in the test's own loop."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvproxy.features.exchange import ray_link
from kvproxy.features.exchange.peers import SyncStatus
from kvproxy.features.exchange.ray_link import Switchboard
from kvproxy.operate.config.load import ConfigError, load_config
from tests.features.exchange.support import deciding, until_synced
from tests.support.fake_engine import FakeEngine
from tests.support.loopback import serve
from tests.support.until import until

SYNC = {"ray": "kvproxy-app-engine", "heartbeat": "50ms"}


class ActorDiedError(Exception):
    """As of ray.exceptions."""


class ActorUnschedulableError(Exception):
    """As of ray.exceptions."""


class Handle:
    """Handle of an actor: `method.remote(...)` can be awaited."""

    def __init__(self, target: Switchboard) -> None:
        self.target = target
        self.error: type[Exception] | None = None
        self.called = 0

    def __getattr__(self, name: str) -> Any:
        method: Callable[..., Awaitable[Any]] = getattr(self.target, name)

        async def call(*given: Any) -> Any:
            self.called += 1
            if self.error is not None:
                raise self.error
            return await method(*given)

        return SimpleNamespace(remote=call)


@pytest.fixture
def actors(monkeypatch: pytest.MonkeyPatch) -> dict[str, Handle]:
    """Return the actors by name; a name without one gets one."""
    found: dict[str, Handle] = {}

    def options(*, name: str, namespace: str, get_if_exists: bool) -> Any:
        assert namespace == "kvproxy"
        assert get_if_exists
        return SimpleNamespace(remote=lambda: found.setdefault(name, Handle(Switchboard())))

    ray = ModuleType("ray")
    ray.__spec__ = SimpleNamespace()  # type: ignore[assignment]
    errors = ModuleType("ray.exceptions")
    vars(errors)["ActorDiedError"] = ActorDiedError
    vars(errors)["ActorUnschedulableError"] = ActorUnschedulableError
    vars(ray)["is_initialized"] = lambda: True
    vars(ray)["get_runtime_context"] = lambda: SimpleNamespace(get_node_id=lambda: "node")
    vars(ray)["remote"] = lambda **_: lambda _: SimpleNamespace(options=options)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.exceptions", errors)
    return found


async def test_replicas_that_meet_at_an_actor_decide_as_one(actors: dict[str, Handle]) -> None:
    async with (
        serve(FakeEngine("a")) as engine,
        deciding(engine, sync={**SYNC, "replica": "one"}) as one,
        deciding(engine, sync={**SYNC, "replica": "two"}) as two,
    ):
        await until_synced(one, two)
        assert (await one.ask()).status_code == 200
        await until(lambda: two.entries() == one.entries() > 0)
        assert list(actors) == ["kvproxy-app-engine"]
        assert one.metric("kvproxy_sync_store_up") == 1


@pytest.mark.parametrize("error", [ActorDiedError, ActorUnschedulableError, TimeoutError])
async def test_replicas_whose_actor_is_gone_meet_at_the_next_one(
    error: type[Exception], actors: dict[str, Handle]
) -> None:
    """One that died, and one that Ray never starts since its node is gone, or that does not answer."""
    async with (
        serve(FakeEngine("a")) as engine,
        deciding(engine, sync={**SYNC, "replica": "one"}) as one,
        deciding(engine, sync={**SYNC, "replica": "two"}) as two,
    ):
        await until_synced(one, two)
        actors.pop("kvproxy-app-engine").error = error
        await until(lambda: one.status is two.status is SyncStatus.SYNCED and "kvproxy-app-engine" in actors)
        await one.ask()
        await until(lambda: two.entries() == one.entries() > 0)


async def test_the_maker_of_an_actor_keeps_its_handle_while_the_link_is_down(actors: dict[str, Handle]) -> None:
    """Ray ends an actor whose maker has dropped the first handle, and every other replica would lose it too."""
    async with (
        serve(FakeEngine("a")) as engine,
        deciding(engine, sync={**SYNC, "replica": "one"}) as one,
        deciding(engine, sync={**SYNC, "replica": "two"}) as two,
    ):
        await until_synced(one, two)
        made = actors.pop("kvproxy-app-engine")  # who asks by name now gets another
        made.target._listeners.clear()  # each call fails from now on
        await until(lambda: len(made.target._listeners) == 2)
        await until_synced(one, two)
        assert not actors


@pytest.mark.parametrize(
    "left",
    [
        pytest.param({"is_initialized": lambda: False}, id="none"),
        pytest.param({"get_runtime_context": lambda: SimpleNamespace(get_node_id=lambda: "next")}, id="another"),
    ],
)
async def test_a_process_that_left_ray_calls_nothing_of_it(
    left: dict[str, Any], actors: dict[str, Handle], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray would start a cluster for such a call, and a call of an actor of the cluster before crashes the process."""
    async with serve(FakeEngine("a")) as engine, deciding(engine, sync={**SYNC, "replica": "one"}) as one:
        await until(lambda: one.metric("kvproxy_sync_store_up") == 1)
        actor = actors.pop("kvproxy-app-engine")
        for name, answer in left.items():
            monkeypatch.setitem(vars(sys.modules["ray"]), name, answer)
        called = actor.called
        await until(lambda: one.metric("kvproxy_sync_store_up") == 0)
        assert (await one.ask()).status_code == 200
        assert actor.called == called
        assert not actors


async def test_messages_for_one_that_is_gone_are_let_go_when_they_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray_link, "MAX_WAITING_BYTES", 2000)
    board = Switchboard()
    for name in ("here", "gone"):
        await board.listen(name, ["all"])
    board._listeners["gone"].asked_at -= ray_link.GONE_S + 1
    for _ in range(2):
        await board.publish([("all", b"x" * 1000)])
    assert list(board._listeners) == ["here"]


async def test_messages_go_to_the_listeners_of_their_topic_in_order() -> None:
    board = Switchboard()
    await board.listen("one", ["all", "to one"])
    await board.listen("two", ["all"])
    await board.publish([("all", b"1"), ("to one", b"2"), ("to nobody", b"3"), ("all", b"4")])
    assert await board.take("one") == [b"1", b"2", b"4"]
    assert await board.take("two") == [b"1", b"4"]


async def test_a_listener_waits_for_the_next_message(monkeypatch: pytest.MonkeyPatch) -> None:
    board = Switchboard()
    await board.listen("one", ["all"])
    taking = asyncio.create_task(board.take("one"))
    await asyncio.sleep(0)
    await board.publish([("all", b"1")])
    assert await taking == [b"1"]
    monkeypatch.setattr(ray_link, "HOLD_S", 0.0)
    assert await board.take("one") == []


async def test_the_oldest_messages_of_a_slow_listener_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_link, "MAX_WAITING_BYTES", 3000)
    board = Switchboard()
    await board.listen("slow", ["all"])
    await board.publish([("all", bytes([number]) * 1000) for number in range(4)])
    assert [payload[0] for payload in await board.take("slow")] == [2, 3]


async def test_listeners_that_ask_no_more_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_link, "MAX_LISTENERS", 1)
    board = Switchboard()
    await board.listen("one", ["all"])
    with pytest.raises(RuntimeError, match="1 replicas listen already"):
        await board.listen("two", ["all"])
    monkeypatch.setattr(ray_link, "GONE_S", -1.0)
    await board.listen("two", ["all"])
    with pytest.raises(KeyError):
        await board.take("one")


@pytest.mark.parametrize(
    ("sync", "refusal"),
    [
        pytest.param({"ray": "x", "nats": "nats://h:1"}, "replicas meet at one place", id="two places"),
        pytest.param({"ray": "x"}, "the library for ray is not installed", id="no library"),
    ],
)
def test_a_place_in_ray_that_cannot_be_is_refused(
    sync: dict[str, str], refusal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = ray_link.__spec__ if "nats" in sync else None
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *_: found)
    with pytest.raises(ConfigError, match=refusal):
        load_config({"endpoints": ["http://a:1"], "sync": sync})
