"""Transfers on demand: KV is copied to where a request goes, which waits for it as long as that pays."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvproxy.features.transfers import transfers as transfers_module
from kvproxy.features.transfers.note import NOTE, TransferResult
from kvproxy.features.transfers.on_demand import CopyObserver, OnDemand
from kvproxy.operate.config.load import check_config
from kvproxy.operate.receipts.explain import explain_receipt
from kvproxy.operate.receipts.receipt import decode_receipt, note_of
from tests.cache.support import A, B, Fake, controller, copying, long_text, tokenize
from tests.support.loopback import serve
from tests.support.proxy import RunningProxy, running_proxy
from tests.support.until import until

TEXT = long_text("t", 1300)
HELD = 1280
LONG, OTHER = long_text("l", 60_000), long_text("o", 60_000)
LONG_HELD = 59_904


@dataclass
class Stage:
    """Endpoint `a` holds the beginnings of prompts and takes no new requests: all go to `b`."""

    proxy: RunningProxy
    service: Fake
    on_demand: OnDemand
    go_on: asyncio.Event
    engine: Fake  # `b`
    asked: list[asyncio.Task[httpx.Response]] = field(default_factory=list)

    def send(self, text: str) -> asyncio.Task[httpx.Response]:
        """Send a request."""
        task = asyncio.create_task(self.proxy.client.post("/v1/chat/completions", json=body(text)))
        self.asked.append(task)
        return task

    @property
    def answers(self) -> int:
        """Requests that `b` was sent."""
        return self.engine.calls["/v1/chat/completions"]

    @property
    def to_compute(self) -> int:
        """Tokens of prompts that `b` is counted on to compute."""
        target = self.proxy.proxy.clusters["default"].find_endpoint(B)
        assert target is not None
        return target.load.pending_tokens

    async def finish(self) -> list[httpx.Response]:
        """Let the engine go on, and return all answers."""
        self.go_on.set()
        return await asyncio.gather(*self.asked)

    def result(self, result: str) -> float:
        """Return requests for which a copy ended so."""
        return self.proxy.metric("kvproxy_kvcache_transfers_on_demand_total", result=result)


def body(text: str) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}]}


def held_by_a(tokens: list[int]) -> dict[str, Any]:
    beginning = tokenize(body(TEXT))["tokens"][:HELD]
    return {"a": ["LocalCPUBackend", HELD]} if tokens[:HELD] == beginning else {}


def moved(asked: dict[str, Any]) -> dict[str, Any]:
    """All of it, at once."""
    return {"event_id": "x", "num_tokens": len(asked["tokens"])}


def long_held_by_a(tokens: list[int]) -> dict[str, Any]:
    """Return a prompt that takes many seconds to compute: no test's machine is so slow that its copy is not worth a
    wait."""
    return {"a": ["LocalCPUBackend", LONG_HELD]} if len(tokens) > LONG_HELD else {}


@contextlib.asynccontextmanager
async def stage(service: Fake, receipts: Path | None = None, **transfers: Any) -> AsyncIterator[Stage]:
    """Yield the proxy with both engines, and time for copies unless told otherwise."""
    transfers = {"max_wait": "60s", "tokens_per_second": 100_000, **transfers}
    go_on = asyncio.Event()

    async def answer(_: dict[str, Any]) -> dict[str, Any]:
        await go_on.wait()
        usage = {"prompt_tokens": 1301, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": HELD}}
        return {"choices": [], "usage": usage}

    engines = [Fake({"/tokenize": tokenize, "/v1/chat/completions": answer}) for _ in "ab"]
    async with serve(service) as url, serve(engines[0]) as a, serve(engines[1]) as b:
        kvcache = copying(url, **transfers)
        more: dict[str, Any] = {} if receipts is None else {"receipts": {"path": str(receipts)}}
        filters = ["inference_request", {"kvcache": kvcache}, "router"]
        async with running_proxy({"a": a, "b": b}, policy="kv_aware", queue={}, filters=filters, **more) as proxy:
            cluster, kv = proxy.proxy.clusters["default"], proxy.proxy.kvcache
            assert kv is not None
            copies = kv.observers.find(CopyObserver)
            assert copies is not None
            await until(lambda: kv.overlap.store.possible)
            cluster.operator.drain_endpoint(A)
            yield Stage(proxy, service, copies.on_demand, go_on, engines[1])
            go_on.set()


@dataclass
class Slow:
    """A `/move` that ends when it is told to."""

    end: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, asked: dict[str, Any]) -> dict[str, Any]:
        await self.end.wait()
        return moved(asked)


async def test_a_copy_that_does_not_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that would wait longer, as one that came later to the copy, is decided then."""
    monkeypatch.setattr(transfers_module, "TIMEOUT_S", 0.01)
    slow = Slow()
    service = controller(long_held_by_a, move=slow)
    async with stage(service) as staged:
        transfers = staged.on_demand._transfers
        transfers.settings = transfers.settings.model_copy(update={"max_wait": 0.01})
        staged.send(LONG)
        await until(lambda: staged.answers == 1)
        slow.end.set()
        await staged.finish()
        assert staged.result("timeout") == 1
        assert staged.on_demand._transfers.link.running == 0


async def test_nothing_is_copied_that_is_computed_as_fast() -> None:
    """Fewer tokens than `min_tokens`."""
    service = controller(long_held_by_a, move=moved)
    async with stage(service, min_tokens=LONG_HELD + 1) as staged:
        staged.send(LONG)
        await staged.finish()
    assert service.calls["/move"] == 0


@pytest.mark.parametrize(
    ("queue", "lmcache", "said"),
    [({}, "", "needs lmcache_endpoint"), ({"enabled": False}, "http://127.0.0.1:9", "no cluster has a queue")],
)
def test_it_needs_a_queue_and_a_service(queue: dict[str, Any], lmcache: str, said: str) -> None:
    """Refused where it could do nothing."""
    kvcache = {"transfers": {"on_demand": True}, **({"lmcache_endpoint": lmcache} if lmcache else {})}
    raw: dict[str, Any] = {
        "endpoints": ["http://127.0.0.1:9"],
        "policy": "kv_aware",
        "filters": ["inference_request", {"kvcache": kvcache}, "router"],
    }
    config, problems = check_config({**raw, "queue": queue})
    assert config is None
    assert any(said in problem.message for problem in problems)


async def test_a_request_waits_for_its_copy(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It has its place, and goes when the copy is there, from the holder, though that takes no requests; what was
    brought counts among what was predicted, and is in the log and the receipt."""
    caplog.set_level(logging.INFO, "kvproxy.audit")
    slow, path = Slow(), tmp_path / "receipts.jsonl"
    service = controller(long_held_by_a, move=slow)
    async with stage(service, path) as staged:
        cluster = staged.proxy.proxy.clusters["default"]
        staged.go_on.set()
        staged.send(LONG)
        await until(lambda: service.calls["/move"] == 1)
        target = cluster.find_endpoint(B)
        assert target is not None
        assert (staged.answers, target.load.in_flight) == (0, 1)
        assert 0 < staged.to_compute < 1000
        slow.end.set()
        (answer,) = await staged.finish()
        assert answer.status_code == 200
        assert (staged.answers, staged.result("done")) == (1, 1)
        assert staged.proxy.metric("kvproxy_kvcache_transfer_wait_seconds_count") == 1
        assert staged.proxy.metric("kvproxy_kvcache_transferred_tokens_total", endpoint="b") == LONG_HELD
        assert staged.on_demand._waiting == {}
        assert target.load.in_flight == 0
    (asked,) = service.bodies["/move"]
    assert (asked["old_position"][0], asked["new_position"][0], len(asked["tokens"])) == ("a", "b", LONG_HELD)
    line = next(one for one in caplog.messages if "action=transfer" in one)
    for word in ("instance=b", "reason=placed", "source=a"):
        assert word in line
    (receipt,) = [decode_receipt(line) for line in path.read_bytes().splitlines()]
    assert (receipt.facts[B].lower_tokens, receipt.facts[B].source) == (LONG_HELD, "lmcache_controller")
    note = note_of(receipt, NOTE, TransferResult)
    assert note is not None
    assert (note.endpoint, note.source, note.result, note.moved) == (B, A, "done", LONG_HELD)
    assert note.waited_s > 0.0
    assert "; it waited " in explain_receipt(receipt)


async def test_no_request_waits_longer_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy does not end: the engine computes after `max_wait`."""
    monkeypatch.setattr(transfers_module, "TIMEOUT_S", 60.0)
    slow = Slow()
    service = controller(long_held_by_a, move=slow)
    async with stage(service, max_wait="1ms") as staged:
        staged.send(LONG)
        await until(lambda: staged.answers == 1)
        assert staged.to_compute > LONG_HELD
        (answer,) = await staged.finish()
        assert answer.status_code == 200
        assert (staged.answers, staged.result("late")) == (1, 1)
        assert [copy.requests for copy in staged.on_demand._waiting.values()] == [[]]
        slow.end.set()
        await until(lambda: staged.on_demand._waiting == {})
        assert staged.on_demand._transfers.link.running == 0


async def test_nor_longer_than_the_copy_is_to_save() -> None:
    """A short prompt, and an hour that it might wait."""
    slow = Slow()
    service = controller(held_by_a, move=slow)
    async with stage(service) as staged:
        staged.go_on.set()
        staged.send(TEXT)
        (answer,) = await staged.finish()
        assert answer.status_code == 200
        assert staged.result("late") == 1
        slow.end.set()


@pytest.mark.parametrize(
    ("move", "result"),
    [((500, {"error": "no such worker"}), ""), ({"event_id": "x", "num_tokens": 0}, "no_effect")],
    ids=["fails", "brings nothing"],
)
async def test_a_copy_that_comes_to_nothing_is_not_waited_for(move: Any, result: str) -> None:
    """The request goes as soon as that is known, and nothing of it is believed: the engine is to compute it all."""
    service = controller(long_held_by_a, move=lambda _: move)
    async with stage(service) as staged:
        staged.send(LONG)
        await until(lambda: staged.answers == 1)
        assert staged.to_compute > LONG_HELD
        (answer,) = await staged.finish()
        assert answer.status_code == 200
        assert staged.result("done") == staged.result("late") == 0
        if result:
            assert staged.result(result) == 1
        assert staged.on_demand._waiting == {}


async def test_a_copy_that_is_refused_after_all_is_not_counted_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request goes at once, and has its place for all that the engine computes."""
    service = controller(long_held_by_a, move=moved)
    async with stage(service) as staged:
        monkeypatch.setattr(staged.on_demand._transfers, "begin", lambda *_: False)
        staged.send(LONG)
        await until(lambda: staged.answers == 1)
        assert staged.to_compute > LONG_HELD
        (answer,) = await staged.finish()
        assert answer.status_code == 200
        assert service.calls["/move"] == 0


async def test_a_client_that_leaves_while_its_copy_is_made_gives_its_place_back() -> None:
    slow = Slow()
    service = controller(long_held_by_a, move=slow)
    async with stage(service) as staged:
        target = staged.proxy.proxy.clusters["default"].find_endpoint(B)
        assert target is not None
        leaving = staged.send(LONG)
        await until(lambda: service.calls["/move"] == 1)
        staged.asked.remove(leaving)
        leaving.cancel()
        await until(lambda: staged.result("left") == 1 and target.load.in_flight == 0)
        assert [copy.requests for copy in staged.on_demand._waiting.values()] == [[]]
        slow.end.set()
        await until(lambda: staged.on_demand._waiting == {})
        assert staged.answers == 0


async def test_with_no_room_on_the_link_a_request_is_decided_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Told once a request, however often it is asked where it would go."""
    monkeypatch.setattr(transfers_module, "AT_ONCE", 1)
    slow = Slow()
    service = controller(long_held_by_a, move=slow)
    async with stage(service) as staged:
        staged.go_on.set()
        staged.send(LONG)
        await until(lambda: service.calls["/move"] == 1)
        staged.send(OTHER)
        await until(lambda: staged.proxy.metric("kvproxy_kvcache_transfers_refused_total", reason="busy") == 1)
        assert service.calls["/move"] == 1
        slow.end.set()
        answers = await staged.finish()
        assert [answer.status_code for answer in answers] == [200, 200]
        assert staged.proxy.metric("kvproxy_kvcache_transfers_refused_total", reason="busy") == 1


async def test_a_request_with_the_same_beginning_waits_for_the_same_copy() -> None:
    """It is sent where the first one will have left its prompt: without a wait the engine would compute it all."""
    slow = Slow()
    service = controller(long_held_by_a, move=slow)
    async with stage(service) as staged:
        staged.go_on.set()
        staged.send(LONG)
        await until(lambda: service.calls["/move"] == 1)
        staged.send(f"{LONG} more")
        await until(lambda: [len(copy.requests) for copy in staged.on_demand._waiting.values()] == [2])
        staged.send(TEXT)
        await until(lambda: staged.answers == 1)
        slow.end.set()
        answers = await staged.finish()
        assert [answer.status_code for answer in answers] == [200, 200, 200]
        assert staged.result("done") == 2
        assert service.calls["/move"] == 1


async def test_a_fault_in_the_plan_fails_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    service = controller(long_held_by_a, move=moved)
    async with stage(service) as staged:
        staged.go_on.set()

        def broken(*_: object) -> None:
            raise RuntimeError("a fault")

        monkeypatch.setattr(staged.on_demand, "offer", broken)
        staged.send(TEXT)
        (answer,) = await staged.finish()
        assert answer.status_code == 200
        assert service.calls["/move"] == 0


def test_a_wait_for_nothing_is_said() -> None:
    """`max_wait` is for copies on demand."""
    kvcache = {"lmcache_endpoint": "http://127.0.0.1:9", "transfers": {"max_wait": "1s"}}
    raw = {"endpoints": ["http://127.0.0.1:9"], "filters": ["inference_request", {"kvcache": kvcache}, "router"]}
    config, problems = check_config(raw)
    assert config is not None
    assert [str(problem.message) for problem in problems if "max_wait" in str(problem)] == [
        "does nothing without on_demand"
    ]
