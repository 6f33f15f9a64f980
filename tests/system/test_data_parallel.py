"""Data-parallel ranks through a whole proxy: what engines are sent, and what becomes of a rank that they refuse."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.types import Send

from kvproxy.base.types import EndpointId
from kvproxy.proxy.listener.server import serve
from tests.support.fake_engine import Call, FakeEngine, answer_ok, reply
from tests.support.proxy import RunningProxy, chat, running_proxy

HEADER = "x-data-parallel-rank"
TRUSTED: list[Any] = ["request_id", "inference_request", {"router": {"trust_clients": True}}]


class RankedEngine(FakeEngine):
    """Has the ranks of a range, or says what another one is."""

    def __init__(self, name: str, ranks: range, refusal: str = "") -> None:
        super().__init__(name, self._answer)
        self.ranks = ranks
        self.refusal = refusal or f"data_parallel_rank {{}} is out of range [{ranks.start}, {ranks.stop})."

    async def _answer(self, engine: FakeEngine, call: Call, send: Send) -> None:
        rank = call.header(HEADER)
        if rank is None or not rank.isdigit() or int(rank) in self.ranks:
            await answer_ok(engine, call, send)
        else:
            message = self.refusal.format(rank)
            body = b'{"error":{"message":"%s","type":"BadRequestError","param":null,"code":400}}' % message.encode()
            await reply(send, 400, body)

    @property
    def asked(self) -> list[str | None]:
        """The rank of every request, as it was sent."""
        return [call.header(HEADER) for call in self.calls]


@contextlib.asynccontextmanager
async def in_front_of(engine: FakeEngine, *ranks: int, **config: Any) -> AsyncIterator[RunningProxy]:
    """Yield a proxy with one engine, which is configured to have these ranks."""
    async with serve(engine) as url:
        endpoints = [{"id": "a", "url": url, "data_parallel": {"ranks": list(ranks)}}]
        async with running_proxy(endpoints, **config) as proxy:
            yield proxy


async def post(proxy: RunningProxy, times: int = 1, **kwargs: Any) -> list[str]:
    """Send requests; returns the endpoints that answered."""
    answers = [await proxy.client.post("/v1/chat/completions", json=chat(), **kwargs) for _ in range(times)]
    assert [answer.status_code for answer in answers] == [200] * times
    return [answer.headers["x-kvproxy-endpoint"] for answer in answers]


async def test_a_request_names_the_rank_it_is_for() -> None:
    """By its number, over one pool of connections, and never a client's own."""
    engine = RankedEngine("a", range(2))
    async with in_front_of(engine, 0, 1) as proxy:
        assert await post(proxy, 4, headers={HEADER: "7"}) == ["a@0", "a@1", "a@0", "a@1"]
    assert engine.asked == ["0", "1", "0", "1"]
    assert all(sum(name == HEADER.encode() for name, _ in call.headers) == 1 for call in engine.calls)


async def test_without_ranks_nothing_is_sent() -> None:
    """Nor is a client's own, by which it could choose an engine's rank."""
    engine = FakeEngine("a")
    async with serve(engine) as url, running_proxy({"a": url}) as proxy:
        assert await post(proxy, headers={HEADER: "1"}) == ["a"]
        assert engine.calls[0].header(HEADER) is None


@pytest.mark.parametrize("refusal", ["", "routed_dp_rank {} is out of range [0, 2)", "invalid data parallel rank {}"])
async def test_a_refused_rank_costs_one_further_question(refusal: str) -> None:
    """The client sees nothing of it; then the rank is no candidate any more, and it is counted."""
    engine = RankedEngine("a", range(2), refusal)
    async with in_front_of(engine, 0, 1, 2) as proxy:
        assert await post(proxy, 5) == ["a@0", "a@1", "a@2", "a@0", "a@1"]
        labels = {"cluster": "default", "endpoint": "a@2", "outcome": "dropped"}
        assert proxy.metric("kvproxy_rank_refusals_total", **labels) == 0  # the endpoint left, and its series with it
        assert [str(one.id) for one in proxy.proxy.clusters["default"].endpoints] == ["a@0", "a@1"]
    assert engine.asked == ["0", "1", "2", None, "0", "1"]


async def test_a_refusal_that_does_not_name_the_rank_is_believed_the_third_time() -> None:
    """vLLM's front end in Rust says `engine-core error` for other reasons too."""
    engine = RankedEngine("a", range(1), "engine-core error")
    async with in_front_of(engine, 0, 1) as proxy:
        assert await post(proxy, 6) == ["a@0", "a@1"] * 3
        assert await post(proxy, 2) == ["a@0", "a@0"]
        labels = {"cluster": "default", "endpoint": "a@1"}
        assert proxy.metric("kvproxy_rank_refusals_total", outcome="doubted", **labels) == 0  # left with its series
    assert engine.asked == ["0", "1", None] * 3 + ["0", "0"]


@pytest.mark.parametrize("first", [4, 0])
async def test_the_second_server_of_hybrid_balancing_is_asked_by_the_numbers_it_knows(first: int) -> None:
    """vLLM's front end in Rust takes the rank in the deployment, the one in Python the place among its own."""
    engine = RankedEngine("a", range(first, first + 4))
    async with in_front_of(engine, 4, 5, 6, 7) as proxy:
        assert await post(proxy, 8) == ["a@4", "a@5", "a@6", "a@7"] * 2
    numbers = [str(first + number) for number in range(4)] * 2
    assert engine.asked == (numbers if first else ["4", None, *numbers[1:]])


async def test_a_clients_own_mistake_is_its_own() -> None:
    """A 400 about something else is its answer; one that stays without the rank says nothing about the rank."""
    engine = FakeEngine("a")

    async def wrong(engine: FakeEngine, call: Call, send: Send) -> None:
        await reply(send, 400, b'{"error":{"message":"%s"}}' % (b"temperature" if b"hot" in call.body else b"dp_rank"))

    engine.behave = wrong
    async with in_front_of(engine, 0, 1) as proxy:
        for text in ("hot", "x"):
            answer = await proxy.client.post("/v1/chat/completions", json=chat(text))
            assert answer.status_code == 400
        assert len(proxy.proxy.clusters["default"].endpoints) == 2
    assert [call.header(HEADER) for call in engine.calls] == ["0", "1", None]


async def test_a_trusted_clients_own_rank_stands() -> None:
    """It goes to an endpoint of that rank, and as it was sent where no engine is known to have it or it is none."""
    engine = RankedEngine("a", range(10))
    async with in_front_of(engine, 0, 1, filters=TRUSTED) as proxy:
        assert await post(proxy, 3, headers={HEADER: "1"}) == ["a@1"] * 3
        await post(proxy, 1, headers={HEADER: "5"})
        await post(proxy, 1, headers={HEADER: "one"})
    assert engine.asked == ["1", "1", "1", "5", "one"]


async def test_ranks_of_one_engine_fail_together() -> None:
    """The next attempt goes to another engine, not to another rank of the same one."""
    broken, good = FakeEngine("a"), FakeEngine("b")

    async def break_off(engine: FakeEngine, call: Call, send: Send) -> None:
        await reply(send, 500, b"{}")

    broken.behave = break_off
    async with serve(broken) as one, serve(good) as other:
        endpoints = [{"id": "a", "url": one, "data_parallel": {"ranks": [0, 1]}}, {"id": "b", "url": other}]
        async with running_proxy(endpoints) as proxy:
            assert await post(proxy) == ["b"]
    assert len(broken.calls) == 1


@pytest.mark.parametrize(
    ("path", "fields", "in_body"),
    [
        ("/v1/chat/completions", chat(), True),
        ("/v1/completions", {"model": "m", "prompt": "x"}, True),
        ("/v1/responses", {"model": "m", "input": "x"}, True),
        ("/v1/messages", {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}, False),
    ],
)
async def test_sglang_is_told_in_the_body_too(path: str, fields: dict[str, Any], in_body: bool) -> None:
    """Where it may not read the header: every other byte stays, with a priority beside it, and after a refusal the
    field is left out with the header."""
    engine = RankedEngine("a", range(1))
    filters = ["request_id", "inference_request", "kvcache", "router"]
    config = {"policy": "kv_aware", "engine_priority": "on", "filters": filters}
    async with in_front_of(engine, 0, 1, **config) as proxy:
        ranked = proxy.proxy.clusters["default"]
        ranked.ranks.observe_ranks(ranked.engines[0], (), None, in_body=True)
        body = b" " + json.dumps(fields).encode()
        for name in ("a@0", "a@1"):
            other = "a@1" if name == "a@0" else "a@0"
            ranked.operator.drain_endpoint(EndpointId(name), draining=False)
            ranked.operator.drain_endpoint(EndpointId(other))
            answer = await proxy.client.post(path, content=body, headers={"content-type": "application/json"})
            assert answer.status_code == 200
    sent = [json.loads(call.body) for call in engine.calls]
    assert [one.pop("routed_dp_rank", None) for one in sent] == ([0, 1, None] if in_body else [None] * 3)
    assert all(one.pop("priority") >= 0 for one in sent)
    assert sent == [fields] * 3
    assert engine.asked == ["0", "1", None]


async def test_sglangs_field_alone() -> None:
    """Without a priority."""
    engine = FakeEngine("a")
    async with in_front_of(engine, 0, 1) as proxy:
        ranked = proxy.proxy.clusters["default"]
        ranked.ranks.observe_ranks(ranked.engines[0], (), None, in_body=True)
        await post(proxy)
        await proxy.client.post("/v1/embeddings", json={"model": "m", "input": "x"})
    assert engine.calls[0].body.startswith(b'{"routed_dp_rank":0,"model":')
    assert b"routed_dp_rank" not in engine.calls[1].body
