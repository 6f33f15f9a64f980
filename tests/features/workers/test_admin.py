"""The operator's listener of several workers."""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
import pytest

from kvproxy.base.errors import ConfigError
from kvproxy.features.workers.assignment import Change
from kvproxy.features.workers.supervisor import Slot
from kvproxy.operate.config.load import load_config
from kvproxy.operate.feature import Feature
from kvproxy.proxy.listener.server import serve
from tests.cache.fleet import simulated
from tests.cache.support import count_uses, long_text
from tests.features.workers.together import Together, begin_worker, together
from tests.support.fake_engine import FakeEngine
from tests.support.proxy import chat

CHAT = "/v1/chat/completions"


@contextlib.asynccontextmanager
async def served_together(**config: Any) -> AsyncIterator[Together]:
    """Two workers before one engine that answers."""
    async with serve(FakeEngine("a")) as url, together({"a": url}, **config) as both:
        yield both


@pytest.fixture
def audit(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """Lines of the audit log."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("kvproxy.audit").addHandler(handler)
    yield lines
    logging.getLogger("kvproxy.audit").removeHandler(handler)


async def test_the_page_shows_the_sums() -> None:
    """Requests of both workers, of one endpoint; decisions of both, each found again by its number."""
    async with served_together() as both:
        for client, requests in zip(both.clients, (1, 2), strict=True):
            for _ in range(requests):
                assert (await client.post(CHAT, json=chat())).status_code == 200
        assert await both.metric('kvproxy_requests_total{cluster="default",endpoint="a",status="200"}') == 3
        assert await both.metric("kvproxy_workers") == 2
        for proxy in both.proxies:
            await proxy._history.take_sample()
        live = await both.live()
        assert live["last_minute"]["requests"] == 3
        assert [(one["id"], one["requests_last_minute"]) for one in live["endpoints"]] == [("a", 3)]
        assert [one["serves"] for one in live["workers"]] == [True, True]
        decisions = (await both.admin.get("/decisions?limit=10")).json()["decisions"]
        assert len({one["number"] for one in decisions}) == 3
        for one in decisions:
            again = (await both.admin.get(f"/decisions/{one['number']}")).json()
            assert again["request_id"] == one["request_id"]
            assert "candidates" in again


async def test_metrics_never_fall_when_a_worker_is_gone() -> None:
    """Its counts at the last scrape still count, its gauges do not; nothing is counted twice."""
    async with served_together() as both:
        for client in both.clients:
            await client.post(CHAT, json=chat())
        series = 'kvproxy_requests_total{cluster="default",endpoint="a",status="200"}'
        assert await both.metric(series) == 2
        limit = await both.metric('kvproxy_queue_limit{queue="picks"}')
        both.end(1)
        assert await both.metric(series) == 2
        assert await both.metric(series) == 2
        assert await both.metric('kvproxy_queue_limit{queue="picks"}') == limit / 2
        assert await both.metric("kvproxy_workers") == 1
        assert any("worker 1 does not serve" in one["what"] for one in (await both.live())["findings"])


async def test_a_change_is_made_in_all(audit: list[str]) -> None:
    """Drained in both, and written to the audit log once, with whom it came from."""
    async with served_together() as both:
        answer = await both.admin.post("/endpoints/default/a/drain")
        assert (answer.status_code, answer.json()["condition"]) == (200, "draining")
        assert [proxy.clusters["default"].endpoints[0].draining for proxy in both.proxies] == [True, True]
        assert [line.split()[1:3] for line in audit] == [["action=endpoint.drain", "from=127.0.0.1"]]
        assert (await both.admin.post("/endpoints/default/a/undrain")).json()["condition"] == "up"
        assert len(both.workers.supervisor.served.changes) == 1


@pytest.mark.parametrize(("path", "status"), [("/endpoints", 200), ("/routing", 200), ("/decisions", 400)])
async def test_a_limit_that_is_none_is_the_workers_business(path: str, status: int) -> None:
    """Where there is a limit it is refused, elsewhere it means nothing; neither breaks the page of all."""
    async with served_together() as both:
        answer = await both.admin.get(f"{path}?limit=many")
        alone = await both.admin.get(path)
        assert answer.status_code == status
        assert status != 200 or answer.json().keys() == alone.json().keys()


async def test_hot_prefixes_of_all_workers_are_exported() -> None:
    """Lines and no JSON; what two know is there once."""
    kvcache = {"kvcache": {"warming": {"export": "tokens"}}}
    async with served_together(filters=["inference_request", kvcache, "router"]) as both:
        for proxy, keys in zip(both.proxies, ((1,), (1, 2)), strict=True):
            assert proxy.kvcache is not None
            for key in keys:
                count_uses(proxy.kvcache.actions.hotness, key, now=proxy.clock(), times=50)
        answer = await both.admin.get("/warm")
        assert (answer.status_code, answer.headers["content-type"]) == (200, "application/x-ndjson")
        prompts = [msgspec.json.decode(line)["prompt"] for line in answer.content.splitlines()]
        assert sorted(prompt[0] for prompt in prompts) == [10_000, 20_000]
        for limit in (1, 2):  # of all workers together
            limited = await both.admin.get(f"/warm?limit={limit}")
            assert len(limited.content.splitlines()) == limit


async def test_a_prompt_is_warmed_by_one_worker(audit: list[str]) -> None:
    """Sent once, and once more to verify it, a long one too; no worker that starts later does it again."""
    prompt = {"model": "tiny", "messages": [{"role": "system", "content": long_text("s", 200)}], "user": "u" * 70_000}
    async with simulated() as place, together(place.engines, policy="kv_aware") as both:
        answer = await both.admin.post("/warm?limit=1", json={"request": prompt})
        assert [one["result"] for one in answer.json()["endpoints"]] == ["done"]
        found, computed = [
            await both.metric(f'kvproxy_kvcache_warmed_tokens_total{{state="{state}"}}')
            for state in ("found", "computed")
        ]
        assert answer.json()["endpoints"][0]["cached_tokens"] == found
        assert 0 < computed < 2 * found
        assert not both.workers.supervisor.served.changes
        assert [line.split()[1:3] for line in audit if "warm" in line] == [["action=warm", "from=127.0.0.1"]]


async def test_a_change_that_is_refused_is_made_in_none(audit: list[str]) -> None:
    """The refusal is the worker's own: what, where, and what to do."""
    async with served_together() as both:
        answer = await both.admin.post("/endpoints/default/b/drain")
        assert (answer.status_code, answer.json()["problems"][0]["where"]) == (404, "id")
        assert not both.workers.supervisor.served.changes
        assert not audit


async def test_a_worker_that_starts_later_knows_what_was_changed(audit: list[str]) -> None:
    """An endpoint that was added and one that was drained, before it serves."""
    async with served_together() as both:
        await both.admin.post("/endpoints", json={"id": "b", "url": "http://127.0.0.1:9"})
        await both.admin.post("/endpoints/default/a/drain")
        both.end(1)
        audit.clear()
        async with begin_worker(both.workers.supervisor, 1) as proxy:
            states = {str(one.id): one.draining for one in proxy.clusters["default"].endpoints}
            assert states == {"a": True, "b": False}
        assert not audit


async def test_a_worker_whose_sockets_file_was_removed_answers_as_before() -> None:
    """By the descriptor of the file, whatever cleans up temporary folders: with it the folder may be gone."""
    async with served_together() as both:
        slots = both.workers.supervisor.slots
        shutil.rmtree(slots[0].path.parent)
        assert (await both.admin.post("/endpoints/default/a/drain")).status_code == 200
        assert all(proxy.clusters["default"].endpoints[0].draining for proxy in both.proxies)
        assert (await both.admin.get("/log")).status_code == 200
        assert not slots[1].path.exists()


async def test_the_log_level_is_that_of_all() -> None:
    """The supervisor's own too."""
    level = logging.getLogger().level
    try:
        async with served_together() as both:
            answer = await both.admin.patch("/log", json={"level": "error"})
            assert answer.json() == {"level": "error"}
            assert (await both.admin.patch("/log", json={"level": "loud"})).status_code == 422
    finally:
        logging.getLogger().setLevel(level)


async def test_a_reload_is_taken_into_use_by_all() -> None:
    """A cluster's new endpoint is there in both, and those that start later get it."""
    async with served_together() as both:
        config = both.workers.config
        settings = config.clusters["default"]
        more = load_config({"endpoints": {"b": "http://127.0.0.1:9"}}).clusters["default"].endpoints
        changed = settings.model_copy(update={"endpoints": (*settings.endpoints, *more)})
        await both.workers.reload(config.model_copy(update={"clusters": {"default": changed}}))
        for proxy in both.proxies:
            assert [str(one.id) for one in proxy.clusters["default"].endpoints] == ["a", "b"]
        assert len(both.workers.config.clusters["default"].endpoints) == 2
        told = [slot.process.told for slot in both.workers.supervisor.slots if slot.process]
        assert told == [1, 1]


async def test_a_reload_without_a_change_is_no_news() -> None:
    """Where it comes more often than a worker takes to start, one would be restarted for ever for what it has."""
    async with served_together() as both:
        supervisor = both.workers.supervisor
        await both.workers.reload(both.workers.config.model_copy())
        assert supervisor.served.number == 0
        clusters = {"default": both.workers.config.clusters["default"].model_copy(update={"max_in_flight": 7})}
        await both.workers.reload(both.workers.config.model_copy(update={"clusters": clusters}))
        assert supervisor.served.number == 1


@pytest.mark.parametrize("refusing", [0, 1])
async def test_a_reload_that_one_worker_refuses_changes_none(refusing: int) -> None:
    """Whichever it is: the others discard what they prepared, and the problem names the one."""
    async with served_together() as both:
        before = [proxy.config for proxy in both.proxies]

        async def refuse(config: object) -> None:
            raise RuntimeError("no port left")

        both.proxies[refusing].generations.prepare = refuse  # type: ignore[method-assign,assignment]
        config = both.workers.config
        with pytest.raises(ConfigError, match="no port left") as raised:
            await both.workers.reload(
                config.model_copy(update={"retry": config.retry.model_copy(update={"attempts": 9})})
            )
        assert len(raised.value.problems) == 1
        assert [proxy.config for proxy in both.proxies] == before
        assert both.workers.config is config


async def test_a_place_is_settled_where_it_was_reserved() -> None:
    """Questions go to the workers in turn; the id says which one."""
    async with served_together() as both:
        ids = []
        for _ in range(2):
            answer = await both.admin.post("/pick", json={"reserve": True, "request": chat()})
            assert answer.status_code == 201
            ids.append(answer.json()["reservation"]["id"])
        assert [one.partition("-")[0] for one in ids] == ["0", "1"]
        assert await both.metric('kvproxy_in_flight_requests{cluster="default",endpoint="a"}') == 2
        for one in ids:
            assert (await both.admin.post(f"/pick/{one}/first_token")).status_code == 200
            assert (await both.admin.post(f"/pick/{one}/done", json={"status": 200})).status_code == 200
        assert (await both.admin.post(f"/pick/{ids[0]}/done", json={})).status_code == 404
        assert (await both.admin.post("/pick/7-abc/done", json={})).status_code == 503


async def test_access_is_controlled_once_for_all() -> None:
    """Without the token nothing is asked of a worker; with it everything is there."""
    async with served_together(admin={"token": "secret"}) as both:
        assert (await both.admin.get("/endpoints")).status_code == 401
        assert (await both.admin.get("/healthz")).status_code == 200
        both.admin.headers["authorization"] = "Bearer secret"
        for path in (
            "/endpoints",
            "/cache/status",
            "/cache/hot",
            "/cache/leases",
            "/cache/breaks",
            "/routing",
            "/live",
        ):
            assert (await both.admin.get(path)).status_code == 200, path
        assert (await both.admin.get("/config")).json()["admin"]["token"] == "**********"
        assert (await both.admin.get("/nothing")).status_code == 404
        assert (await both.admin.get("/decisions?limit=x")).status_code == 400
        assert "<html" in (await both.admin.get("/")).text


async def test_without_a_worker_nothing_is_ready() -> None:
    """A load balancer sends no more; the listener says why instead of waiting."""
    async with served_together() as both:
        assert (await both.admin.get("/readyz")).status_code == 200
        for index in (0, 1):
            both.end(index)
        assert (await both.admin.get("/readyz")).status_code == 503
        answer = await both.admin.post("/endpoints/default/a/drain")
        assert (answer.status_code, answer.json()["error"]) == (503, "no worker answers")
        assert (await both.admin.get("/healthz")).status_code == 200


async def test_slow_changes_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as their feature says, or the request itself; others as long as any answer."""
    slow = [Feature()]
    async with served_together() as both:
        waited: list[float | None] = []
        ask = both.workers.ask

        async def note(slot: Slot, change: Change, *, timeout_s: float | None = None, **more: Any) -> object:
            waited.append(timeout_s)
            return await ask(slot, change, timeout_s=timeout_s, **more)

        both.workers.ask = note  # type: ignore[assignment]
        path = "/endpoints/default/a/undrain"
        assert (await both.admin.post(path)).status_code == 200
        monkeypatch.setattr("kvproxy.features.workers.admin.installed", lambda kind: slow)
        slow[0].slow_changes = {path: 65.0}  # type: ignore[misc]
        assert (await both.admin.post(path)).status_code == 200
        assert (await both.admin.post(f"{path}?timeout_s=600")).status_code == 200
        assert waited == [None, None, 65.0, None, 605.0, None]
        refused = await both.admin.post(f"{path}?timeout_s=0")
    assert refused.status_code == 400
    assert refused.json()["problems"][0]["where"] == "timeout_s"
