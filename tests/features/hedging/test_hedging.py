"""Streams whose first byte is late, and the second endpoint that gets them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvproxy.base.types import EndpointId
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.cluster.routing.work import features_of
from kvproxy.features.hedging.note import NOTE, HedgeNote
from kvproxy.features.hedging.race import LEARNED
from kvproxy.operate.config.load import check_config
from kvproxy.operate.receipts.explain import explain_receipt
from kvproxy.operate.receipts.receipt import Receipt, decode_receipt, note_of
from tests.lab.simulator.support import TINY, Running, engine
from tests.support.proxy import RunningProxy, running_proxy
from tests.support.until import until

FILTERS = ["inference_request", "kvcache", "router"]
PATH = "/v1/completions"


@dataclass
class Gateway:
    """Engines `a`, `b` (and `c`) behind a proxy; `a` gets what the policy is free to place, by its weight."""

    proxy: RunningProxy
    engines: Sequence[Running]
    receipts_file: Path

    async def ask(self, **fields: Any) -> httpx.Response:
        return await self.proxy.client.post(PATH, json=body(**fields))

    def hedges(self, result: str) -> float:
        return self.proxy.metric("kvproxy_hedges_total", cluster="default", result=result)

    def endpoint(self, name: str) -> Endpoint:
        found = self.proxy.proxy.clusters["default"].find_endpoint(EndpointId(name))
        assert found is not None
        return found

    def receipt(self) -> Receipt:
        """Return the last one."""
        return decode_receipt(self.receipts_file.read_bytes().splitlines()[-1])

    async def until_idle(self) -> None:
        """Wait until no request is counted anywhere, here or in an engine."""
        await until(lambda: not any(one.load.in_flight for one in self.proxy.proxy.clusters["default"].endpoints))
        for one in self.engines:
            await until(lambda one=one: not one.app.state.runner.engine.load.running)  # type: ignore[misc]


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "Once upon a time", "stream": True, "temperature": 0, "max_tokens": 12,
            "stream_options": {"include_usage": True}, **fields}  # fmt: skip


@contextlib.asynccontextmanager
async def gateway(path: Path, *, engines: int = 2, learned: int = LEARNED, **config: Any) -> AsyncIterator[Gateway]:
    """Yield a proxy that prefers `a`, whose faults decide what is late."""
    async with contextlib.AsyncExitStack() as stack:
        running = [await stack.enter_async_context(engine(TINY)) for _ in range(engines)]
        endpoints = [
            {"id": "abc"[number], "url": one.url, "weight": 1000 if number == 0 else 1}
            for number, one in enumerate(running)
        ]
        more = {"policy": "kv_aware", "filters": FILTERS, "hedge": True, "retry": {"min_per_second": 1000}, **config}
        file = path / "receipts.jsonl"
        proxy = await stack.enter_async_context(running_proxy(endpoints, receipts={"path": str(file)}, **more))
        speeds = proxy.proxy.clusters["default"].speeds
        for _ in range(learned):
            speeds.observe(EndpointId("a"), features_of(10, 0), 0.01, 0.0)  # type: ignore[union-attr]
        yield Gateway(proxy, running, file)


def text_of(answer: httpx.Response) -> str:
    """Return the whole answer's text; it must be that of one engine, to its end."""
    assert answer.status_code == 200, answer.text
    assert answer.text.endswith("data: [DONE]\n\n")
    assert answer.text.count("[DONE]") == 1
    return answer.text


async def expected(both: Gateway) -> int:
    """Return the number of events of an undisturbed answer."""
    return text_of(await both.engines[1].client.post(PATH, json=body())).count("data: ")


async def test_a_late_stream_is_answered_by_the_second_endpoint(tmp_path: Path) -> None:
    """Once, to its end; the first is cancelled and its place free, and the receipt has both."""
    async with gateway(tmp_path) as both:
        events = await expected(both)
        await both.engines[0].faults(stall_first_byte_s=60.0)
        answer = await both.ask()
        assert text_of(answer).count("data: ") == events
        assert (both.hedges("won"), both.hedges("lost")) == (1, 0)
        assert both.endpoint("a").load.in_flight == both.endpoint("b").load.in_flight == 0
        assert both.endpoint("a").health.failures == 0
    receipt = both.receipt()
    note = note_of(receipt, NOTE, HedgeNote)
    assert note is not None
    assert (receipt.endpoint, note.endpoint, note.result) == ("b", "b", "won")
    assert [one.endpoint for one in receipt.attempts] == ["a", "b"]
    assert receipt.attempts[0].failure == "hedged"
    assert note.after_s >= note.expected_s
    assert "it was sent to b as well, which answered first" in explain_receipt(receipt)


async def test_the_first_endpoint_wins_late(tmp_path: Path) -> None:
    """Its answer is the client's, and the second is cancelled."""
    async with gateway(tmp_path) as both:
        events = await expected(both)
        for one in both.engines:
            await one.faults(stall_first_byte_s=60.0)
        asking = asyncio.create_task(both.ask())
        await until(lambda: both.endpoint("b").load.in_flight == 1)
        await both.engines[0].faults(reset=True)
        assert text_of(await asking).count("data: ") == events
        assert (both.hedges("won"), both.hedges("lost")) == (0, 1)
        assert both.endpoint("a").load.in_flight == both.endpoint("b").load.in_flight == 0
        assert both.endpoint("b").health.failures == 0
    assert both.receipt().endpoint == "a"


async def test_an_answer_in_time_is_sent_once(tmp_path: Path) -> None:
    async with gateway(tmp_path) as both:
        text_of(await both.ask())
        assert sum(both.hedges(result) for result in ("won", "lost", "failed", "left", "refused")) == 0
        assert both.engines[1].app.state.calls[f"POST {PATH}"] == 0


async def test_a_single_endpoint_is_waited_for(tmp_path: Path) -> None:
    """The other one is drained."""
    async with gateway(tmp_path) as both:
        both.proxy.proxy.clusters["default"].operator.drain_endpoint(EndpointId("b"))
        await both.engines[0].faults(stall_first_byte_s=0.8)
        text_of(await both.ask())
        assert both.engines[1].app.state.calls[f"POST {PATH}"] == 0


async def test_before_speeds_are_learned_nothing_is_late(tmp_path: Path) -> None:
    """A request at the start of the proxy is sent once."""
    async with gateway(tmp_path, learned=LEARNED - 1) as both:
        await both.engines[0].faults(stall_first_byte_s=0.8)
        text_of(await both.ask())
        assert both.engines[1].app.state.calls[f"POST {PATH}"] == 0


async def test_the_wait_must_exceed_what_the_prompt_costs_elsewhere(tmp_path: Path) -> None:
    """An endpoint with an hour of work is no help."""
    async with gateway(tmp_path) as both:
        for _ in range(3000):
            both.endpoint("b").load.reserve(10_000, 0, 0.0)
        await both.engines[0].faults(stall_first_byte_s=0.8)
        text_of(await both.ask())
        assert both.engines[1].app.state.calls[f"POST {PATH}"] == 0


@pytest.mark.parametrize(
    "fault",
    [{"fail_next": 1}, {"fail_next": 1, "fail_status": 400}, {"busy_next": 1}, {"engine_dead": True}],
)
async def test_the_second_fails_and_the_first_is_waited_for(tmp_path: Path, fault: dict[str, Any]) -> None:
    """Its failure is the endpoint's alone."""
    async with gateway(tmp_path) as both:
        await both.engines[0].faults(stall_first_byte_s=0.8)
        await both.engines[1].faults(**fault)
        text_of(await both.ask())
        assert both.hedges("won") == 0
        assert both.hedges("lost") == 1
        assert next(iter(both.proxy.proxy.recent.latest())).outcome.endpoint == "a"


async def test_the_first_fails_while_the_second_computes(tmp_path: Path) -> None:
    """The second is waited for."""
    async with gateway(tmp_path) as both:
        for one in both.engines:
            await one.faults(stall_first_byte_s=60.0)
        asking = asyncio.create_task(both.ask())
        await until(lambda: both.endpoint("b").load.in_flight == 1)
        await both.engines[0].faults(reset=True, engine_dead=True)
        await until(lambda: both.endpoint("a").load.in_flight == 1 and not asking.done())
        await both.engines[1].faults(reset=True)
        text_of(await asking)
        assert both.hedges("won") == 1
        await both.until_idle()


async def test_both_fail_and_a_third_endpoint_answers(tmp_path: Path) -> None:
    """As after any failed attempt; a hedge counts as one."""
    async with gateway(tmp_path, engines=3, retry={"attempts": 3, "min_per_second": 1000}) as three:
        three.endpoint("c").load.reserve(10_000, 0, 0.0)
        for one in three.engines[:2]:
            await one.faults(stall_first_byte_s=60.0)
        asking = asyncio.create_task(three.ask())
        await until(lambda: three.endpoint("b").load.in_flight == 1)
        for one in three.engines[:2]:
            await one.faults(reset=True, engine_dead=True)
        answer = await asking
        assert three.hedges("failed") == 1
        assert text_of(answer)
        assert three.endpoint("a").load.in_flight == three.endpoint("b").load.in_flight == 0


async def test_both_fail_and_no_other_endpoint_is_left(tmp_path: Path) -> None:
    """The client gets an error, no half answer, and nothing is in flight."""
    async with gateway(tmp_path, retry={"attempts": 2, "min_per_second": 1000}) as both:
        for one in both.engines:
            await one.faults(stall_first_byte_s=60.0)
        asking = asyncio.create_task(both.ask())
        await until(lambda: both.endpoint("b").load.in_flight == 1)
        for one in both.engines:
            await one.faults(reset=True, engine_dead=True)
        answer = await asking
        assert '"error"' in answer.text
        assert both.hedges("failed") == 1
        assert both.endpoint("a").load.in_flight == both.endpoint("b").load.in_flight == 0


async def test_a_client_that_leaves_frees_both(tmp_path: Path) -> None:
    """At once."""
    async with gateway(tmp_path) as both:
        for one in both.engines:
            await one.faults(stall_first_byte_s=60.0)
        asking = asyncio.create_task(both.ask())
        await until(lambda: both.endpoint("b").load.in_flight == 1)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: both.hedges("left") == 1)
        await both.until_idle()
        assert both.endpoint("a").health.failures == both.endpoint("b").health.failures == 0


@pytest.mark.parametrize("fields", [{"stream": False, "stream_options": None}])
async def test_an_answer_that_is_not_streamed_is_sent_once(tmp_path: Path, fields: dict[str, Any]) -> None:
    """Its first token cannot be seen."""
    async with gateway(tmp_path) as both:
        await both.engines[0].faults(stall_first_byte_s=0.8)
        assert (await both.ask(**fields)).status_code == 200
        assert both.engines[1].app.state.calls[f"POST {PATH}"] == 0


async def test_no_retry_budget_is_no_second_sending(tmp_path: Path) -> None:
    """The request waits as ever."""
    async with gateway(tmp_path, retry={"attempts": 1}) as both:
        await both.engines[0].faults(stall_first_byte_s=0.8)
        text_of(await both.ask())
        assert both.hedges("refused") == 1
        assert both.engines[1].app.state.calls[f"POST {PATH}"] == 0


async def test_off_is_the_default(tmp_path: Path) -> None:
    async with gateway(tmp_path, hedge=False) as both:
        await both.engines[0].faults(stall_first_byte_s=0.8)
        text_of(await both.ask())
        assert both.engines[1].app.state.calls[f"POST {PATH}"] == 0


def test_a_policy_without_speeds_is_doubted() -> None:
    doubts = check_config({"endpoints": {"a": "http://127.0.0.1:1"}, "policy": "round_robin", "hedge": True})[1]
    assert any("has no effect with round_robin" in one.message for one in doubts)
