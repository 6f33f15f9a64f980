"""The controller client: every shape its versions answer, every way it fails."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Awaitable, Callable

import httpx
import pytest

from kvproxy.base.errors import (
    BadResponse,
    ClientTimeout,
    InstanceBusy,
    NotSupported,
    Refused,
    UnknownInstance,
)
from kvproxy.cache.store import ActionKind, Holder, Prefix
from kvproxy.features.lmcache.controller import LMCacheController
from kvproxy.features.lmcache.provider import Effect
from tests.cache.clients.support import Handler, Upstream
from tests.support.loopback import serve

TOKENS = array("I", range(1024))
PROMPT = Prefix(TOKENS, "m")
BUSY = "Operation cannot be accomplished in current state"
UNKNOWN = "The number of tokens pinned should be the same across all workers."

Action = Callable[[LMCacheController], Awaitable[object]]


def controller(handler: Handler | httpx.Response) -> tuple[LMCacheController, Upstream]:
    upstream = Upstream(handler)
    return LMCacheController(upstream.http, "http://127.0.0.1:9000"), upstream


def answering(body: object, *, status: int = 200) -> tuple[LMCacheController, Upstream]:
    return controller(httpx.Response(status, json=body))


@pytest.mark.parametrize("place", [["LocalCPUBackend", 1024], {"0": "LocalCPUBackend", "1": 1024}])
async def test_lookup_reads_the_array_and_pixius_object(place: object) -> None:
    """The real controller sends an array, Pixiu's stand-in an object: both are one holder."""
    client, upstream = answering({"event_id": "Lookup1", "layout_info": {"vllm-a": place}})
    assert await client.lookup(PROMPT) == [Holder("vllm-a", 1024, True)]
    assert upstream.body == {"tokens": list(TOKENS)}


@pytest.mark.parametrize("body", [{"event_id": "x", "layout_info": {}}, {"layout_info": {}}])
async def test_a_miss_is_nobody(body: object) -> None:
    """Also from controllers before 0.3.5, which send no event id."""
    assert await answering(body)[0].lookup(PROMPT) == []


async def test_holders_keep_the_order_of_chunks() -> None:
    """The first one holds the first chunk: often the shortest match."""
    client, _ = answering({"layout_info": {"b": ["LocalDiskBackend", 256], "a": ["LocalCPUBackend", 1024]}})
    assert [holder.instance_id for holder in await client.lookup(PROMPT)] == ["b", "a"]


@pytest.mark.parametrize(
    "layout",
    [None, [], {"a": ["x"]}, {"a": ["x", -1]}, {"a": ["x", "1"]}, {"a": {"0": "x"}}, {"a": ["x", 1, 2]}, {"a": 5}],
)
async def test_a_layout_of_another_shape_is_a_bad_response(layout: object) -> None:
    """Nothing is guessed into a match."""
    with pytest.raises(BadResponse):
        await answering({"layout_info": layout})[0].lookup(PROMPT)


@pytest.mark.parametrize(
    ("body", "effect"),
    [
        ({"event_id": "Pin1", "num_tokens": 1024}, Effect(1024)),
        ({"event_id": "Pin1", "num_tokens": 0}, Effect(0)),
        ({"success": True}, Effect(1)),
        ({"success": False}, Effect(0)),
        ({"event_id": "Pin1"}, Effect(None)),
    ],
)
async def test_success_is_an_effect_not_a_status(body: object, effect: Effect) -> None:
    """A wrong location answers 200 with 0 tokens; controllers before 0.3.5 may not say at all."""
    assert await answering(body)[0].act(ActionKind.PIN, "vllm-a", PROMPT) == effect


async def test_bodies_of_actions() -> None:
    """Fields of every version at once: unknown ones are ignored by all of them."""
    client, upstream = answering({"event_id": "x", "num_tokens": 1})
    at = {"location": "LocalCPUBackend", "locations": ["LocalCPUBackend"]}
    tokens = list(TOKENS)
    await client.act(ActionKind.PIN, "a", PROMPT)
    assert upstream.body == {"tokens": tokens, "instance_id": "a", **at}
    await client.act(ActionKind.COMPRESS, "a", PROMPT)
    assert upstream.body == {"tokens": tokens, "instance_id": "a", "method": "cachegen", **at}
    await client.act(ActionKind.DECOMPRESS, "a", PROMPT)
    assert upstream.body == {"tokens": tokens, "instance_id": "a", "method": "cachegen", **at}
    await client.act(ActionKind.CLEAR, "a", PROMPT)
    assert upstream.body == {"instance_id": "a", **at}
    await client.act(ActionKind.EVICT, "a", PROMPT)
    assert upstream.body == {"tokens": tokens, "instance_id": "a"}
    await client.act(ActionKind.TRANSFER, "b", PROMPT, source="a")
    assert upstream.body == {
        "tokens": tokens,
        "old_position": ["a", "LocalCPUBackend"],
        "new_position": ["b", "LocalCPUBackend"],
        "should_copy": True,
        "copy": True,
    }
    assert [request.url.path for request in upstream.requests] == [
        "/pin", "/compress", "/decompress", "/clear", "/evict", "/move",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("detail", "kind"),
    [
        (BUSY, InstanceBusy),
        (UNKNOWN, UnknownInstance),
        ("Operation 'pin' is not supported.", NotSupported),
        ("Src worker 0 not registered for instance a or P2P is not enabled.", NotSupported),
        ("", Refused),
        ("1 validation error for QueryInstResponse", Refused),
    ],
)
async def test_a_500_is_classified_by_its_text(detail: str, kind: type[Refused]) -> None:
    """A busy socket may be tried again, an unknown instance may not."""
    with pytest.raises(Refused) as refused:
        await answering({"detail": detail}, status=500)[0].act(ActionKind.PIN, "a", PROMPT)
    assert type(refused.value) is kind
    assert refused.value.status == 500


async def test_a_422_does_not_show_the_tokens() -> None:
    """The controller echoes the whole request."""
    detail = [{"type": "x", "loc": ["body", "tokens", 0], "msg": "bad", "input": list(TOKENS)}]
    with pytest.raises(Refused) as refused:
        await answering({"detail": detail}, status=422)[0].lookup(PROMPT)
    assert str(refused.value) == "lmcache controller /lookup: 422 body.tokens.0: bad"


async def test_no_evict_is_found_out_once() -> None:
    """No real controller has /evict: after one 404 it is never called again."""
    client, upstream = answering({"detail": "Not Found"}, status=404)
    assert client.evicts is None
    for _ in range(3):
        with pytest.raises(NotSupported):
            await client.act(ActionKind.EVICT, "a", PROMPT)
    assert client.evicts is False
    assert len(upstream.requests) == 1


async def test_evict_where_there_is_one() -> None:
    """Pixiu's stand-in has it."""
    client, _ = answering({"event_id": "Evict1", "num_tokens": 512})
    assert (await client.act(ActionKind.EVICT, "a", PROMPT)).amount
    assert client.evicts is True


async def test_a_worker_that_cannot_evict_says_nothing_about_the_controller() -> None:
    """Only a missing route switches the capability off."""
    client, _ = answering({"detail": "Operation 'evict' is not supported."}, status=500)
    with pytest.raises(NotSupported):
        await client.act(ActionKind.EVICT, "a", PROMPT)
    assert client.evicts is None


async def test_key_stats() -> None:
    """Live numbers of the index."""
    rows = [{"instance_id": "vllm-a", "key_count": 4, "worker_count": 1}]
    body = {"total_key_count": 4, "total_instance_count": 1, "total_worker_count": 1, "instances": rows}
    client = answering(body)[0]
    assert (await client.indexed_chunks(), await client.instances()) == (4, {"vllm-a"})


class Worker:
    """A controller whose instance `dead` never answers and which breaks when one instance is called twice at once."""

    def __init__(self) -> None:
        self.busy: set[str] = set()
        self.served: list[str] = []

    async def __call__(self, scope: object, receive: Callable[[], Awaitable[dict[str, object]]], send: object) -> None:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")  # type: ignore[operator]
            if not message.get("more_body"):
                break
        instance = json.loads(body)["instance_id"]
        if instance in self.busy:
            await self._reply(send, 500, {"detail": BUSY})
            return
        self.busy.add(instance)
        if instance == "dead":
            await asyncio.Event().wait()
        await asyncio.sleep(0.01)
        self.busy.remove(instance)
        self.served.append(instance)
        await self._reply(send, 200, {"event_id": "x", "num_tokens": 256})

    async def _reply(self, send: object, status: int, body: object) -> None:
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": headers})  # type: ignore[operator]
        await send({"type": "http.response.body", "body": json.dumps(body).encode()})  # type: ignore[operator]


async def test_one_action_at_a_time_per_instance() -> None:
    """Ten actions at once on two instances: the controller, which breaks on parallel ones, sees none."""
    worker = Worker()
    async with serve(worker) as url, httpx.AsyncClient(trust_env=False) as http:
        client = LMCacheController(http, url)
        names = ["a", "b"] * 5
        async with asyncio.TaskGroup() as group:
            results = [group.create_task(client.act(ActionKind.PIN, name, PROMPT)) for name in names]
    assert all(result.result().amount for result in results)
    assert sorted(worker.served) == sorted(names)


@pytest.mark.parametrize("action", ["pin", "clear", "move"])
async def test_a_dead_worker_costs_one_timeout(action: str) -> None:
    """The controller hangs for ever on it; the call ends at its own timeout and other instances go on."""
    actions: dict[str, Action] = {
        "pin": lambda client: client.act(ActionKind.PIN, "dead", PROMPT),
        "clear": lambda client: client.act(ActionKind.CLEAR, "dead", PROMPT),
        "move": lambda client: client.act(ActionKind.TRANSFER, "a", PROMPT, source="dead"),
    }

    async def never(request: httpx.Request) -> httpx.Response:
        if b"dead" in request.content:
            await asyncio.Event().wait()
        return httpx.Response(200, json={"event_id": "x", "num_tokens": 1})

    http = httpx.AsyncClient(transport=httpx.MockTransport(never))
    client = LMCacheController(http, "http://127.0.0.1:9000", timeout_s=0.02)
    with pytest.raises(ClientTimeout):
        await actions[action](client)
    assert (await client.act(ActionKind.PIN, "a", PROMPT)).amount


@pytest.mark.parametrize(("holders", "readable"), [(1024, True), (1025, False)])
async def test_an_answer_names_a_bounded_number_of_instances(holders: int, readable: bool) -> None:
    """No fleet has more, and each costs something."""
    client, _ = answering({"event_id": "x", "layout_info": {f"i{n}": ["LocalCPUBackend", 256] for n in range(holders)}})
    if readable:
        assert len(await client.lookup(PROMPT)) == holders
    else:
        with pytest.raises(BadResponse):
            await client.lookup(PROMPT)
