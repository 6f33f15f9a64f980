"""Findings for an operator: the most harmful first, each with its age, and one word for all of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvproxy.app import Proxy
from kvproxy.base.errors import ClientUnavailable
from kvproxy.base.tls.files import ServerTls
from kvproxy.base.tls.watch import CertificateWatch
from kvproxy.base.types import EndpointId, InferenceRequest, Prompt, RequestKind
from kvproxy.cache.feedback.trust import LossReason
from kvproxy.cluster.prober import ProbeOutcome
from kvproxy.operate.admin.app import build_admin_app
from kvproxy.operate.runtime.history import History
from kvproxy.operate.runtime.operated import ConfigFinding
from kvproxy.proxy.request.exchange import Exchange, Outcome
from tests.operate.admin.support import admin_of, proxy_of
from tests.support.certificates import make_certificate
from tests.support.clock import FakeClock

THREE = {name: f"http://127.0.0.1:{port}" for port, name in enumerate("abc", start=9)}


class Place:
    """A proxy with three endpoints, and what its page says."""

    def __init__(self, clock: FakeClock, **config: Any) -> None:
        self.clock = clock
        self.proxy: Proxy = proxy_of(clock=clock, **{"endpoints": THREE, **config})
        self.history = History(self.proxy)
        self.proxy.admin = build_admin_app(self.proxy, self.history)

    def probe_fails(self, name: str) -> None:
        """Once is enough for an endpoint that was never well."""
        cluster = self.proxy.clusters["default"]
        endpoint = cluster.find_endpoint(EndpointId(name))
        assert endpoint is not None
        cluster.verdicts.record_probe(endpoint.engine, ProbeOutcome.UNREACHABLE)

    async def answer(self, count: int, *, endpoint: str = "b", status: int = 200, end: str = "completed") -> None:
        """End requests like this, and take a sample of them."""
        for _ in range(count):
            exchange = Exchange(received_at=self.clock())
            exchange.outcome = Outcome(EndpointId(endpoint), "default", status=status, end=end)
            self.proxy.recent.finished(exchange, self.clock())
        await self.history.take_sample()

    async def fail(self, count: int, reason: str, *, endpoint: str | None = None, status: int = 502) -> None:
        """Answer requests by the proxy itself."""
        for _ in range(count):
            exchange = Exchange(received_at=self.clock())
            where = None if endpoint is None else EndpointId(endpoint)
            exchange.outcome = Outcome(where, "default", status=status, end="local_reply", local_reason=reason)
            self.proxy.recent.finished(exchange, self.clock())
        await self.history.take_sample()

    async def stream(self, count: int, *, endpoint: str, ttft_s: float) -> None:
        """Streamed answers with their first byte after so long."""
        for _ in range(count):
            exchange = Exchange(received_at=self.clock())
            exchange.inference = InferenceRequest(RequestKind.CHAT, "m", Prompt(b"", ()), stream=True)
            exchange.outcome = Outcome(EndpointId(endpoint), "default", status=200, end="completed", ttft_s=ttft_s)
            self.proxy.recent.finished(exchange, self.clock())
        await self.history.take_sample()

    async def live(self) -> dict[str, Any]:
        async with admin_of(self.proxy) as client:
            answer: dict[str, Any] = (await client.get("/live")).json()
        return answer


async def test_a_certificate_that_expires_soon(clock: FakeClock, tmp_path: Path) -> None:
    """Once, with how long it lasts."""
    place = Place(clock)
    place.proxy.certificates = CertificateWatch()
    files = make_certificate(tmp_path, "127.0.0.1")  # until tomorrow
    place.proxy.certificates.server_context("listen", ServerTls(str(files.certificate), str(files.private_key)))
    (found,) = [one for one in (await place.live())["findings"] if one["where"] == "listen"]
    assert found["what"] == "the certificate expires in 1.0 days"
    assert "without a restart" in found["fix"]


async def test_every_answer_a_500_is_a_failure(clock: FakeClock) -> None:
    """An engine whose core died answers 500, and each of these ends as it should: all the same all failed."""
    place = Place(clock)
    await place.answer(20, status=500)
    live = await place.live()
    assert live["last_minute"] == {"requests": 20, "failed": 20, "saved_prefill_s": None}
    assert live["history"]["failed"] == [20]
    assert live["state"] == {
        "kind": "down", "text": "100% of requests fail", "sentence": "100% of requests fail", "since_s": None
    }  # fmt: skip
    [finding] = live["findings"]
    assert (finding["severity"], finding["where"]) == ("problem", "default")
    assert finding["what"] == "100% of 20 requests failed in the last minute: 20 were answered with 5xx (b)"
    assert finding["fix"] == "read the log of these engines"
    assert {one["result"] for one in live["failed_decisions"]} == {"failed"}


async def test_a_clients_mistakes_are_no_failures(clock: FakeClock) -> None:
    """4xx, and clients that left."""
    place = Place(clock)
    await place.answer(20, status=404)
    await place.answer(20, status=499, end="client_disconnected")
    live = await place.live()
    assert (live["last_minute"]["failed"], live["findings"], live["failed_decisions"]) == (0, [], [])
    assert live["state"] == {"kind": "good", "text": "ready", "sentence": "All engines up", "since_s": None}


async def test_a_dead_engine_comes_first_with_its_age(clock: FakeClock) -> None:
    """Before failing requests and warnings of the configuration: since when, why, and which endpoint took over."""
    place = Place(clock)
    place.proxy.findings = [ConfigFinding("note", "log", "small"), ConfigFinding("warning", "endpoints", "clear text")]
    await place.answer(0)
    clock.advance(90.0)
    place.probe_fails("a")
    await place.answer(7, endpoint="c")
    clock.advance(30.0)
    await place.answer(3, status=502)
    live = await place.live()
    assert [one["where"] for one in live["findings"]] == ["default/a", "default", "endpoints", "log"]
    first = live["findings"][0]
    assert first["what"] == "down: its probes fail (not reachable); c, b took over"
    assert (first["age_s"], live["findings"][2]["age_s"]) == (30.0, 120.0)
    assert live["state"]["text"] == "degraded: 30% of requests fail"
    clock.advance(60.0)
    await place.answer(1)
    assert (await place.live())["state"] == {
        "kind": "warn", "text": "degraded: 2 of 3 up", "sentence": "1 of 3 engines down", "since_s": 90.0
    }  # fmt: skip


async def test_an_engine_that_sleeps_is_named(clock: FakeClock) -> None:
    """With what to do about it."""
    place = Place(clock)
    cluster = place.proxy.clusters["default"]
    cluster.endpoints[0].asleep = True
    [found] = (await place.live())["findings"]
    assert (found["severity"], found["where"]) == ("warning", "default")
    assert found["what"] == "a sleeps by its own metrics: excluded from routing"
    assert "/wake_up" in found["fix"]
    cluster.endpoints[1].asleep = True
    clock.advance(2.0)
    assert (await place.live())["findings"][0]["what"].startswith("a, b sleep by their own metrics")


async def test_a_cache_that_was_lost_is_a_note_for_a_while(clock: FakeClock) -> None:
    """How that was noticed, and since when."""
    place = Place(clock)
    kvcache = place.proxy.kvcache
    assert kvcache is not None
    kvcache.state.losses.note_loss("default", EndpointId("b"), LossReason.CLEARED)
    [found] = (await place.live())["findings"]
    assert (found["severity"], found["where"]) == ("note", "default/b")
    assert found["what"] == "dropped its cache (reported by its KV events)"
    clock.advance(601.0)
    assert not (await place.live())["findings"]


async def test_events_that_are_not_believed_are_named(clock: FakeClock) -> None:
    """With the latest numbers."""
    place = Place(clock)
    kvcache = place.proxy.kvcache
    assert kvcache is not None
    for _ in range(5):
        missed = kvcache.overlap.indexes["default"].missed
        missed.observe_reuse(EndpointId("c"), announced_tokens=0, reused_tokens=4000)
    [found] = (await place.live())["findings"]
    assert (found["severity"], found["where"]) == ("warning", "default/c")
    assert "announce less than it reuses (0 of 4,000 tokens; 5 of the last 8)" in found["what"]


async def test_when_none_is_up(clock: FakeClock) -> None:
    """Not ready, and said so in one finding; the engines with the same cause together."""
    place = Place(clock)
    for name in "abc":
        place.probe_fails(name)
    clock.advance(5.0)
    live = await place.live()
    assert live["state"] == {
        "kind": "down", "text": "down: 0 of 3 engines up", "sentence": "No engine up", "since_s": 0.0
    }  # fmt: skip
    [finding] = live["findings"]
    assert (finding["severity"], finding["where"]) == ("problem", "default")
    assert finding["what"] == ("all 3 engines are down (a, b, c: not reachable); requests go to all of them")


async def test_a_finding_of_the_start_that_is_still_found_is_shown_once(clock: FakeClock) -> None:
    """A remembered one would outlive its cause, and both would hide what is urgent."""
    place = Place(clock)
    place.probe_fails("a")
    [found] = (await place.live())["findings"]
    place.proxy.findings = [ConfigFinding("warning", found["where"], found["what"], found["fix"])]
    assert (await place.live())["findings"] == [found]


async def test_nothing_was_saved_by_engines_that_are_gone(clock: FakeClock) -> None:
    """The figure of the minute before an outage is no good news."""
    place = Place(clock, policy="kv_aware")
    speeds = place.proxy.clusters["default"].speeds
    assert speeds is not None
    speeds.observe(EndpointId("a"), (1.0, 1000.0, 0.0, 0.0), 0.2, clock())
    assert (await place.live())["last_minute"]["saved_prefill_s"] == 0.0
    for name in "abc":
        place.probe_fails(name)
    clock.advance(1.0)
    assert (await place.live())["last_minute"]["saved_prefill_s"] is None


async def test_causes_are_named_with_their_fix(clock: FakeClock) -> None:
    """A full router queue, no endpoint, an engine's 5xx: the most frequent first, each with how many and where."""
    place = Place(clock, policy="kv_aware", queue={"limit": 4})
    await place.answer(80)
    await place.fail(20, "queue_full", status=429)
    await place.fail(12, "connect_error", endpoint="a")
    await place.fail(5, "connect_error", endpoint="c")
    await place.fail(3, "no_endpoints", status=503)
    [finding] = (await place.live())["findings"]
    assert finding["what"] == (
        "33% of 120 requests were not served in the last minute: 20 refused, as the router queue is full (limit 4), "
        "17 got no connection (a 12, c 5), 3 found no endpoint"
    )
    assert finding["fix"].startswith("add engines, or raise `queue.limit`; are these engines up")


async def test_few_refusals_are_no_finding(clock: FakeClock) -> None:
    """Below a share of all requests."""
    place = Place(clock, policy="kv_aware", queue={"limit": 4})
    await place.answer(100)
    await place.fail(4, "queue_full", status=429)
    assert not (await place.live())["findings"]


async def test_events_are_kept_for_an_hour(clock: FakeClock) -> None:
    """Down and up again, drained, all at once in one line; the newest first."""
    place = Place(clock)
    await place.history.take_sample()
    clock.advance(60.0)
    for name in "ab":
        place.probe_fails(name)
    await place.history.take_sample()
    clock.advance(60.0)
    place.proxy.clusters["default"].endpoints[2].draining = True
    events = (await place.live())["events"]
    assert [(one["ago_s"], one["kind"], one["what"]) for one in events] == [
        (0.0, "", "c drained"),
        (60.0, "down", "a, b down"),
    ]
    clock.advance(3545.0)
    assert [one["what"] for one in (await place.live())["events"]] == ["c drained"]


async def test_errors_and_first_byte_of_each_endpoint(clock: FakeClock) -> None:
    """Attempts that another endpoint made good count against the one that failed."""
    place = Place(clock)
    place.proxy.clusters["default"].endpoints[0].metrics.attempt_failure("status_5xx")
    await place.stream(10, endpoint="b", ttft_s=0.2)
    await place.stream(1, endpoint="b", ttft_s=3.0)
    shown = {one["id"]: one for one in (await place.live())["endpoints"]}
    assert [shown[name]["errors_last_minute"] for name in "abc"] == [1, 0, 0]
    assert [shown[name]["ttft_p95_s"] for name in "abc"] == [None, 3.0, None]
    clock.advance(61.0)
    await place.history.take_sample()
    shown = {one["id"]: one for one in (await place.live())["endpoints"]}
    assert (shown["a"]["errors_last_minute"], shown["b"]["ttft_p95_s"]) == (0, None)


async def test_many_dead_engines_are_one_finding(clock: FakeClock) -> None:
    """The page stays readable when a rack is gone; a drained endpoint is not ill."""
    names = [f"engine-{number}" for number in range(6)]
    place = Place(clock, endpoints={name: f"http://127.0.0.1:{n}" for n, name in enumerate(names, start=9)})
    for name in names[:4]:
        place.probe_fails(name)
    place.proxy.clusters["default"].endpoints[4].draining = True
    [finding] = (await place.live())["findings"]
    assert finding["what"] == (
        "4 of 6 endpoints are down (engine-0, engine-1, engine-2 and 1 more); engine-5 would take its requests"
    )


async def test_a_controller_that_is_down_is_a_finding(clock: FakeClock) -> None:
    """Its cost and its last error are in the text."""
    place = Place(clock)
    assert place.proxy.kvcache is not None
    guard = place.proxy.kvcache.breakers

    async def refused() -> None:
        raise ClientUnavailable("lookup: connection refused")

    while not guard.outages:
        with pytest.raises(ClientUnavailable):
            await guard.call("lookup", refused)
    [finding] = (await place.live())["findings"]
    assert (finding["severity"], finding["where"]) == ("warning", "kvcache")
    assert finding["what"] == (
        "lookup fails: requests are routed by the approximate index and KV events alone "
        "(last error: lookup: connection refused)"
    )


async def test_ages_end_with_their_trouble(clock: FakeClock) -> None:
    """A trouble that returns begins at nothing, and nothing is kept of one that is over."""
    place = Place(clock)
    place.proxy.findings = [ConfigFinding("warning", "endpoints", "clear text")]
    await place.answer(0)
    clock.advance(100.0)
    found, place.proxy.findings = place.proxy.findings, []
    await place.answer(0)
    clock.advance(5.0)
    place.proxy.findings = found
    await place.answer(0)
    clock.advance(2.0)
    assert [one["age_s"] for one in (await place.live())["findings"]] == [2.0]


async def test_ranks_that_requests_cannot_ask_for(clock: FakeClock) -> None:
    """Refused ones, and those that only metrics show, each with what to write. While an engine was not asked yet there
    is nothing to say."""
    ranked = {"id": "a", "url": "http://127.0.0.1:9", "data_parallel": {"ranks": [0, 1, 2]}}
    place = Place(clock, endpoints=[ranked, {"id": "b", "url": "http://127.0.0.1:10"}])
    cluster = place.proxy.clusters["default"]
    cluster.ranks.record_refusal(cluster.endpoints[2], 2)
    cluster.ranks.observe_ranks(cluster.engines[1], (0, 1), None)
    await place.history.take_sample()
    assert [one["where"] for one in (await place.live())["findings"]] == ["default/a"]
    cluster.ranks.observe_ranks(cluster.engines[1], (0, 1), ())
    clock.advance(2)
    await place.history.take_sample()
    found = {one["where"]: (one["what"], one["fix"]) for one in (await place.live())["findings"]}
    assert found == {
        "default/a": (
            "the engine refused the data-parallel rank 2, which gets no requests",
            "set data_parallel.ranks to 0, 1",
        ),
        "default/b": (
            "it has the data-parallel ranks 0, 1, but requests cannot name one: a prefix is computed once per rank",
            "set data_parallel.ranks to 0, 1, or start it with --kv-events-config",
        ),
    }
