"""SGLang's server info; the answers are shaped after its documentation's own captures and its sources."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from kvproxy.base.errors import BadResponse, ClientUnavailable, NotSupported
from kvproxy.cache.clients.event_sources import MAX_SOURCES, KvEventSource
from kvproxy.cache.clients.sglang import SglangInfo
from kvproxy.cache.clients.vllm import VllmClient
from tests.cache.clients.support import Upstream

CONFIG = '{"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5657", "topic": "kv"}'
DESCRIPTOR = {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 5557, "topic": "kv", "block_size": 16}
NOT_FOUND = httpx.Response(404, json={"detail": "Not Found"})


def info(**fields: Any) -> dict[str, Any]:
    arguments = {"model_path": "m", "api_key": "k", "page_size": 16, "dp_size": 1, "tp_size": 1, "enable_metrics": True}
    states = [{**arguments, "last_gen_throughput": 1.5}]
    return {
        **arguments, "status": "ready", "max_total_num_tokens": 20480, "internal_states": states, "version": "0.5.23",
        **fields,
    }  # fmt: skip


def client(answers: dict[str, Any]) -> tuple[VllmClient, Upstream]:
    def answer(request: httpx.Request) -> httpx.Response:
        body = answers.get(request.url.path)
        if isinstance(body, httpx.Response):
            return body
        return NOT_FOUND if body is None else httpx.Response(200, json=body)

    upstream = Upstream(answer)
    return VllmClient(upstream.http, "http://engine-a:30000"), upstream


async def ask(body: dict[str, Any]) -> SglangInfo:
    engine, _ = client({"/server_info": body})
    return await engine.sglang_info()


async def test_its_arguments_and_what_it_made_of_them() -> None:
    """Flat, among a hundred others."""
    told = await ask(info(enable_cache_report=True, speculative_algorithm=None))
    assert (told.version, told.page_size, told.max_total_num_tokens) == ("0.5.23", 16, 20480)
    assert (told.enable_cache_report, told.pairs, told.event_sources(host="e")) == (True, False, ())


async def test_the_old_name_is_asked_where_the_new_one_is_missing() -> None:
    """Versions that know only the old one."""
    engine, upstream = client({"/get_server_info": info(version="0.5.2")})
    assert (await engine.sglang_info()).version == "0.5.2"
    assert [request.url.path for request in upstream.requests] == ["/server_info", "/get_server_info"]


async def test_vllm_s_own_path_of_that_name_is_none() -> None:
    """It answers in developer mode."""
    with pytest.raises(NotSupported):
        await ask({"vllm_config": "model='m'"})
    engine, _ = client({})
    with pytest.raises(NotSupported):
        await engine.sglang_info()


async def test_a_failing_engine_is_not_taken_for_another_kind() -> None:
    """It is asked again later."""

    def fail(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/kv_event_sources":
            return NOT_FOUND
        raise httpx.ConnectError("gone")

    engine = VllmClient(Upstream(fail).http, "http://engine-a:30000")
    with pytest.raises(ClientUnavailable):
        await engine.kv_event_sources()


@pytest.mark.parametrize("field", ["dp_size", "kv_events"])
async def test_ranks_are_bounded(field: str) -> None:
    """Each is a socket of ours."""
    many = MAX_SOURCES + 1
    with pytest.raises(BadResponse, match="ranks"):
        await ask(info(**{field: many if field == "dp_size" else {**DESCRIPTOR, "dp_size": many}}))


async def test_event_streams_by_the_descriptor() -> None:
    """Rank r publishes at base + r; its own host is its own view; replays are named in its configuration."""
    described = {**DESCRIPTOR, "dp_size": 2}
    engine, _ = client({"/server_info": info(dp_size=2, kv_events=described, kv_events_config=CONFIG)})
    assert await engine.kv_event_sources() == (
        KvEventSource(0, "tcp://engine-a:5557", "tcp://engine-a:5657", "kv"),
        KvEventSource(1, "tcp://engine-a:5558", "tcp://engine-a:5658", "kv"),
    )


async def test_a_descriptor_that_names_replays_itself() -> None:
    """It goes before the configuration."""
    told = await ask(info(kv_events={**DESCRIPTOR, "replay_endpoint_port_base": 6000}, kv_events_config=CONFIG))
    assert told.event_sources(host="e") == (KvEventSource(0, "tcp://e:5557", "tcp://e:6000", "kv"),)
    bare = await ask(info(kv_events={**DESCRIPTOR, "topic": None}))
    assert bare.event_sources(host="e") == (KvEventSource(0, "tcp://e:5557"),)


async def test_versions_without_a_descriptor_say_it_by_their_arguments() -> None:
    """As text, or as an object already."""
    for given in (CONFIG, json.loads(CONFIG)):
        told = await ask(info(dp_size=2, kv_events_config=given))
        assert [one.endpoint for one in told.event_sources(host="e")] == ["tcp://e:5557", "tcp://e:5558"]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"kv_events_config": None, "kv_events": None},
        {"kv_events_config": '{"publisher": "null"}'},
        {"kv_events_config": "{not json"},
        {"kv_events_config": {"publisher": 5}},
        {"kv_events_config": '{"x": ' + "[" * 5000 + "]" * 5000 + "}"},
        {"kv_events_config": '{"publisher": "zmq", "endpoint": "inproc://cache"}'},
        {"kv_events": {**DESCRIPTOR, "publisher": "other"}},
    ],
)
async def test_an_engine_that_publishes_nothing_usable(fields: dict[str, Any]) -> None:
    """That is an answer, and no error."""
    engine, _ = client({"/server_info": info(**fields)})
    assert await engine.kv_event_sources() == ()


@pytest.mark.parametrize(("algorithm", "pairs"), [("EAGLE", True), ("eagle3", True), ("NGRAM", False), (None, False)])
async def test_whether_its_tree_is_keyed_by_pairs(algorithm: str | None, pairs: bool) -> None:
    """EAGLE's family, however it is written."""
    assert (await ask(info(speculative_algorithm=algorithm))).pairs is pairs
