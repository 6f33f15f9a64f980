"""Parameters that each connector puts into the legs, and both legs at once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncIterator
from random import Random
from typing import Any

import httpx
import msgspec
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from kvproxy.base.types import RequestKind
from kvproxy.base.upstream.origin import Origin
from kvproxy.features.disaggregation.bodies import read_body, shorten
from kvproxy.features.disaggregation.check import VisitedEngine
from kvproxy.features.disaggregation.companion import CanaryService
from kvproxy.features.disaggregation.connectors.base import EngineFacts, NoHandle
from kvproxy.features.disaggregation.connectors.mooncake import MooncakeConnector
from kvproxy.features.disaggregation.connectors.nixl import NixlConnector
from kvproxy.features.disaggregation.pairs import PairState
from kvproxy.features.disaggregation.watch import find_all
from tests.features.disaggregation.support import prompt, words
from tests.support.fake_engine import Behaviour, Call, FakeEngine, reply
from tests.support.loopback import serve
from tests.support.proxy import RunningProxy, running_proxy
from tests.support.until import until

P = VisitedEngine(Origin.parse("http://10.0.0.1:8000"), None)
ANSWER = b'{"choices":[{"text":"hello"}],"usage":{"prompt_tokens":9}}'


async def answer(engine: FakeEngine, call: Call, send: Send) -> None:
    """Answer at once."""
    await reply(send, 200, ANSWER)


async def wait_for_ever(engine: FakeEngine, call: Call, send: Send) -> None:
    """Answer nothing until the client leaves."""
    await call.gone.wait()


async def fail(engine: FakeEngine, call: Call, send: Send) -> None:
    """Answer 500."""
    await reply(send, 500, b'{"error":{"message":"no"}}')


async def busy(engine: FakeEngine, call: Call, send: Send) -> None:
    """Answer 503."""
    await reply(send, 503, b'{"error":{"message":"later"}}')


def if_pulling(behaviour: Behaviour) -> Behaviour:
    """Return that of a decoder with trouble of its second legs alone."""

    async def decode(engine: FakeEngine, call: Call, send: Send) -> None:
        await (behaviour if b"kv_transfer_params" in call.body else answer)(engine, call, send)

    return decode


@contextlib.asynccontextmanager
async def two_engines(
    connector: str, *, prefill: Behaviour = answer, decode: Behaviour = answer, canary: float = 0
) -> AsyncIterator[tuple[RunningProxy, FakeEngine, FakeEngine]]:
    """Yield a proxy before an engine that prefills and one that decodes."""
    p, d = FakeEngine("p", prefill), FakeEngine("d", decode)
    async with serve(p) as at, serve(d) as other:
        endpoints = [{"id": "p", "url": at, "role": "prefill"}, {"id": "d", "url": other, "role": "decode"}]
        settings = {"connector": connector, "min_tokens": 16, "canary": canary}
        async with running_proxy(endpoints, disaggregation=settings) as proxy:
            yield proxy, p, d


@contextlib.asynccontextmanager
async def mooncakes(
    *, prefill: Behaviour = answer, decode: Behaviour = answer
) -> AsyncIterator[tuple[RunningProxy, FakeEngine, FakeEngine]]:
    """Yield the same with MooncakeConnector, whose pair was proven."""
    async with two_engines("mooncake", prefill=prefill, decode=decode, canary=600) as (proxy, p, d):
        service = next(one for one in proxy.proxy.companions if isinstance(one, CanaryService))
        await service.run_round()  # of which these engines do not know
        state = next(find_all(proxy.proxy.clusters.values()))
        assert state.connector is not None
        for pair in state.pairs:
            pair.state = PairState.GOOD
            pair.due_at = math.inf
            state.connector.facts[pair.prefill] = EngineFacts(ids={"0": "e-1"})
        p.calls.clear()
        d.calls.clear()
        yield proxy, p, d


async def ask(proxy: RunningProxy, **fields: Any) -> httpx.Response:
    return await proxy.client.post("/v1/completions", json=prompt(words("x"), **fields))


def bodies(*engines: FakeEngine) -> list[Any]:
    return [json.loads(call.body) for engine in engines for call in engine.calls]


# NIXL


def nixl_answer(**changes: Any) -> bytes:
    """Return the answer of vLLM 0.32 to a prefill, as captured, with a field of the future."""
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[1, 2, 3]],
        "remote_engine_id": "f7ab0824",
        "remote_request_id": "cmpl-1-0-ab10fee6",
        "remote_host": "127.0.0.1",
        "remote_port": 19441,
        "new_in_0.40": {"a": [1.0, "é"]},
    }
    params = {name: value for name, value in {**params, **changes}.items() if value != "left out"}
    return json.dumps({"id": "cmpl-1", "kv_transfer_params": params}).encode()


def test_nixls_parameters_are_passed_on_whole() -> None:
    """Byte by byte: versions add fields."""
    connector = NixlConnector(0, Random(1))
    member = connector.read_member(nixl_answer(), P)
    params = json.dumps(json.loads(nixl_answer())["kv_transfer_params"]).encode()
    assert member == b'"kv_transfer_params":%b,' % params


@pytest.mark.parametrize(
    "answer",
    [
        nixl_answer(remote_request_id="left out"),
        nixl_answer(remote_engine_id=None),
        nixl_answer(remote_block_ids=[]),
        nixl_answer(do_remote_prefill=False),
        nixl_answer(remote_port="left out"),
        b'{"kv_transfer_params":null}',
        b'{"choices":[]}',
        b"not json",
        b"\xff",
    ],
)
def test_handles_that_a_decoder_would_hang_or_die_of_are_refused(answer: bytes) -> None:
    """The decoder then computes the prompt."""
    with pytest.raises(NoHandle):
        NixlConnector(0, Random(1)).read_member(answer, P)


@pytest.mark.parametrize("groups", [[1, 2, 3], [[1, 2, 3]], [[7], [1, 2, 3]]], ids=["flat", "one", "two"])
@pytest.mark.parametrize(("tokens", "dcp_size", "enough"), [(48, 1, True), (49, 1, False), (49, 2, True)])
async def test_a_handle_with_too_few_blocks_for_its_prompt_is_refused(
    groups: list[Any], tokens: int, dcp_size: int, enough: bool
) -> None:
    """Its decoder's process would end."""
    connector = NixlConnector(0, Random(1))
    found = nixl_answer(remote_block_ids=groups, remote_num_tokens=tokens, dcp_size=dcp_size)
    assert connector.read_member(found, P), "the size of a block is not known"
    await connector.prepare(P, no_fetch, 16)
    if enough:
        assert connector.read_member(found, P)
    else:
        with pytest.raises(NoHandle, match="3 blocks of 16 tokens for a prompt of 49"):
            connector.read_member(found, P)


async def test_older_versions_have_the_tokens_in_the_usage() -> None:
    """Beside the parameters."""
    connector = NixlConnector(0, Random(1))
    await connector.prepare(P, no_fetch, 16)
    found = json.loads(nixl_answer()) | {"usage": {"prompt_tokens": 49}}
    with pytest.raises(NoHandle, match="3 blocks"):
        connector.read_member(json.dumps(found).encode(), P)


async def test_facts_of_an_engine_go_with_it() -> None:
    """Pods come and go for months."""
    connector = NixlConnector(0, Random(1))
    await connector.prepare(P, no_fetch, 16)
    connector.keep_only([P])
    assert connector.facts
    connector.keep_only([])
    assert not connector.facts


async def no_fetch(endpoint: object, port: int, path: str) -> bytes:
    raise AssertionError("nothing is asked for")


@pytest.mark.parametrize("name", ["kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room"])
def test_a_trusted_clients_own_legs_stay_its_own(name: str) -> None:
    """Even null: of two members of that name the engine would read the client's."""
    assert read_body(json.dumps({"prompt": "x", name: None}).encode(), RequestKind.COMPLETION) is None


@pytest.mark.parametrize(
    ("kind", "body", "short"),
    [
        (RequestKind.CHAT, {"stream": True, "stream_options": {}}, {"stream": False, "max_tokens": 1}),
        (
            RequestKind.CHAT,
            {"max_completion_tokens": 9, "min_tokens": 4},
            {"stream": False, "max_tokens": 1, "max_completion_tokens": 1},
        ),
        (
            RequestKind.RESPONSES,
            {"input": "x"},
            {"input": "x", "stream": False, "max_output_tokens": 1, "store": False},
        ),
        (RequestKind.MESSAGES, {"max_tokens": 9}, {"max_tokens": 1, "stream": False}),
    ],
)
def test_a_prefill_is_for_one_token(kind: RequestKind, body: dict[str, Any], short: dict[str, Any]) -> None:
    """Whole, since a streamed one has no parameters."""
    names = read_body(json.dumps(body).encode(), kind)
    assert names is not None
    assert json.loads(msgspec.json.encode(shorten(names, kind))) == short


# Both legs at once.


async def test_sglangs_engines_meet_in_a_room() -> None:
    """Both get the client's body at once, which is not shortened, with the same fresh room."""
    async with two_engines("sglang") as (proxy, p, d):
        assert (await ask(proxy)).json()["choices"][0]["text"] == "hello"
        await ask(proxy)
        first, second, *_ = zip(bodies(p), bodies(d), strict=True)
        for prefilled, decoded in (first, second):
            assert prefilled == decoded
            assert prefilled["bootstrap_host"] == "127.0.0.1"
            assert prefilled["bootstrap_port"] == 8998
            assert prefilled["max_tokens"] == 6
        assert first[0]["bootstrap_room"] != second[0]["bootstrap_room"]


async def test_the_prefill_goes_on_when_the_decoder_is_done() -> None:
    """SGLang's would hold a slot for half an hour otherwise."""
    go = asyncio.Event()

    async def later(engine: FakeEngine, call: Call, send: Send) -> None:
        await go.wait()
        await reply(send, 200, ANSWER)

    async with two_engines("sglang", prefill=later) as (proxy, p, _):
        assert (await ask(proxy)).status_code == 200
        await until(lambda: len(p.calls) == 1)
        assert not p.calls[0].gone.is_set()
        go.set()
        name = "kvproxy_disaggregated_prefills_total"
        await until(lambda: proxy.metric(name, cluster="default", endpoint="p", result="done") == 1)


async def test_every_prompt_goes_in_two_legs_at_sglang() -> None:
    """Its decoders answer 400 to a request without a room, however short."""
    async with two_engines("sglang") as (proxy, p, d):
        await proxy.client.post("/v1/completions", json=prompt("short"))
        assert [body["bootstrap_room"] for body in bodies(p)] == [body["bootstrap_room"] for body in bodies(d)]
        assert len(p.calls) == 1


def in_mode(mode: str, engine: FakeEngine) -> ASGIApp:
    """Return a server that was started with this `--disaggregation-mode`."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("path") == "/server_info":
            await reply(send, 200, json.dumps({"page_size": 16, "disaggregation_mode": mode}).encode())
        else:
            await engine(scope, receive, send)

    return app


@pytest.mark.parametrize(("modes", "served"), [(("prefill", "decode"), 200), (("decode", "prefill"), 503)])
async def test_no_leg_goes_to_a_server_of_the_other_mode(modes: tuple[str, str], served: int) -> None:
    """Both would wait for the bootstrap, for minutes."""
    engines = FakeEngine("p", answer), FakeEngine("d", answer)
    async with serve(in_mode(modes[0], engines[0])) as p, serve(in_mode(modes[1], engines[1])) as d:
        endpoints = [{"id": "p", "url": p, "role": "prefill"}, {"id": "d", "url": d, "role": "decode"}]
        async with running_proxy(endpoints, disaggregation={"connector": "sglang"}) as proxy:
            await next(one for one in proxy.proxy.companions if isinstance(one, CanaryService)).run_round()
            assert (await ask(proxy)).status_code == served
            state = PairState.GOOD if served == 200 else PairState.MODES
            assert [pair.state for pair in next(find_all(proxy.proxy.clusters.values())).pairs] == [state]
            assert all(bool(engine.calls) == (served == 200) for engine in engines)


async def test_a_failed_prefill_at_sglang_is_an_error() -> None:
    """The decode leg ends, and is not sent without a room."""
    async with two_engines("sglang", prefill=fail, decode=wait_for_ever) as (proxy, _, d):
        async with asyncio.timeout(60):
            assert (await ask(proxy)).status_code == 503
        assert all(b"bootstrap_room" in call.body for call in d.calls)
        await until(lambda: all(call.gone.is_set() for call in d.calls))


async def test_another_endpoint_prefills_for_a_busy_one_beside_the_decoder() -> None:
    """In a fresh room, within the same request."""
    prefills: list[Call] = []
    rooms: list[int] = []

    async def busy_once(engine: FakeEngine, call: Call, send: Send) -> None:
        prefills.append(call)
        await (busy if len(prefills) == 1 else answer)(engine, call, send)

    async def decode(engine: FakeEngine, call: Call, send: Send) -> None:
        rooms.append(json.loads(call.body)["bootstrap_room"])
        await (wait_for_ever if len(rooms) == 1 else answer)(engine, call, send)

    engines = {"p": FakeEngine("p", busy_once), "q": FakeEngine("q", busy_once), "d": FakeEngine("d", decode)}
    async with serve(engines["p"]) as p, serve(engines["q"]) as q, serve(engines["d"]) as d:
        urls = {"p": p, "q": q, "d": d}
        endpoints = [
            {"id": name, "url": url, "role": "decode" if name == "d" else "prefill"} for name, url in urls.items()
        ]
        settings = {"connector": "sglang", "canary": 0}
        async with running_proxy(endpoints, disaggregation=settings) as proxy, asyncio.timeout(60):
            assert (await ask(proxy)).json()["choices"][0]["text"] == "hello"
    assert len(set(rooms)) == 2
    assert len(engines["p"].calls) == len(engines["q"].calls) == 1


async def test_a_failed_prefill_ends_the_decode_leg() -> None:
    """It would wait for minutes; the decoder then computes the prompt."""
    async with mooncakes(prefill=fail, decode=if_pulling(wait_for_ever)) as (proxy, _, d):
        async with asyncio.timeout(60):
            assert (await ask(proxy)).json()["choices"][0]["text"] == "hello"
        first, second = d.calls
        await until(first.gone.is_set)
        assert b"kv_transfer_params" not in second.body


async def test_a_failed_decode_leg_ends_the_prefill() -> None:
    """The other way round."""
    async with mooncakes(prefill=wait_for_ever, decode=if_pulling(fail)) as (proxy, p, _):
        assert (await ask(proxy)).status_code == 200
        await until(lambda: bool(p.calls) and p.calls[0].gone.is_set())


async def test_an_error_that_is_not_about_the_handle_is_the_clients() -> None:
    """A decoder that is busy is no reason to doubt its pair."""
    async with mooncakes(prefill=answer, decode=if_pulling(busy)) as (proxy, _, _):
        assert (await ask(proxy)).status_code == 503
        results = "kvproxy_disaggregated_requests_total"
        assert proxy.metric(results, cluster="default", result="error") >= 1
        state = next(find_all(proxy.proxy.clusters.values()))
        assert [pair.state for pair in state.pairs] == [PairState.GOOD]


async def test_a_client_that_leaves_ends_both_legs() -> None:
    """At once."""
    async with two_engines("sglang", prefill=wait_for_ever, decode=wait_for_ever) as (proxy, p, d):
        task = asyncio.create_task(ask(proxy))
        await until(lambda: len(p.calls) == len(d.calls) == 1)
        task.cancel()
        await until(lambda: p.calls[0].gone.is_set() and d.calls[0].gone.is_set())


# Others.


async def test_mooncakes_engine_id_is_asked_for() -> None:
    """And again after a change of the engine's health."""
    asked: list[str] = []

    async def fetch(engine: object, port: int, path: str) -> bytes:
        asked.append(f"{port}{path}")
        return b'{"0":{"engine_id":"e-%d"}}' % len(asked)

    connector = MooncakeConnector(8998, Random(1))
    with pytest.raises(NoHandle):
        connector.begin(P)
    await connector.prepare(P, fetch, 0)
    terms = connector.begin(P)
    prefill = json.loads(bytes(terms.prefill["kv_transfer_params"]))
    decode = json.loads(b"{" + terms.decode.rstrip(b",") + b"}")["kv_transfer_params"]
    assert prefill["transfer_id"] == decode["transfer_id"]
    assert (decode["remote_engine_id"], decode["remote_bootstrap_addr"]) == ("e-1", "http://10.0.0.1:8998")
    connector.forget(P)
    with pytest.raises(NoHandle):
        connector.begin(P)
    await connector.prepare(P, fetch, 0)
    assert b"e-2" in connector.begin(P).decode
    assert asked == ["8998/query"] * 2


async def test_llm_ds_sidecar_is_told_where_to_prefill() -> None:
    """One request goes out, and another without the header where its prefill fails."""

    async def sidecar(engine: FakeEngine, call: Call, send: Send) -> None:
        await (fail if call.header("x-prefiller-host-port") else answer)(engine, call, send)

    async with two_engines("sidecar", decode=sidecar) as (proxy, p, d):
        assert (await ask(proxy)).status_code == 200
        named = [call.header("x-prefiller-host-port") for call in d.calls]
        url = str(next(one for one in proxy.proxy.clusters["default"].endpoints if one.id == "p").origin)
        assert named == [url.removeprefix("http://"), None]
        assert not p.calls


async def test_lmcache_needs_no_parameters() -> None:
    """A prefill for one token, then the client's own request."""
    async with two_engines("lmcache") as (proxy, p, d):
        assert (await ask(proxy)).status_code == 200
        assert [body["max_tokens"] for body in bodies(p, d)] == [1, 6]
        assert json.loads(d.calls[0].body) == prompt(words("x"))
