"""Metrics of a finished request."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import EndpointId, InferenceRequest, Prompt, RequestKind, Tier
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.endpoint_metrics import MAX_MODELS
from kvproxy.cluster.routing.policy import Overlap, OverlapFacts
from kvproxy.cluster.settings import ClusterSettings, EndpointSettings, PolicyName, RouteSettings
from kvproxy.proxy.forward import metrics as savings
from kvproxy.proxy.forward.metrics import RouteMetrics, spared_s
from kvproxy.proxy.request.exchange import RESULTS, Exchange, Outcome, result_of
from tests.support.clock import FakeClock

A = EndpointId("a")


class Bench:
    """A cluster of two endpoints that declare models, and what a router counts of it."""

    def __init__(
        self, clock: FakeClock, *, policy: str = "round_robin", models: tuple[str, ...] = ("m",), **served: Any
    ) -> None:
        endpoints = tuple(
            EndpointSettings(id=i, url=f"http://127.0.0.1:{n}", models=models) for n, i in [(1, "a"), (2, "b")]
        )
        settings = ClusterSettings(policy=PolicyName(policy), endpoints=endpoints)
        self.catalog = Metrics()
        self.cluster = Cluster("c", settings, metrics=self.catalog, clock=clock, rng=random.Random(1))
        routes = (RouteSettings(model="alias", cluster="c"), RouteSettings(model="wild*", cluster="c"))
        self.metrics = RouteMetrics(self.catalog, clusters={"c": self.cluster}, routes=routes, **served)

    def finish(
        self, *, model: str = "m", tenant: str = "", stream: bool = True, facts: bool = True, **outcome: Any
    ) -> None:
        """One request that began at 0 and ended at 10."""
        exchange = Exchange(received_at=0.0)
        exchange.inference = InferenceRequest(RequestKind.CHAT, model, Prompt(b"", (b"",)), stream=stream)
        exchange.facts = OverlapFacts(1000, {A: Overlap(400, ((Tier.HOST, 200),))}) if facts else None
        exchange.tenant = tenant
        known = {"endpoint": A, "cluster": "c", "status": 200, "end": "completed", "ttft_s": 1.0, "prompt_tokens": 1000,
                 "cached_tokens": 600, "completion_tokens": 10}  # fmt: skip
        exchange.outcome = Outcome(**{**known, **outcome})
        self.metrics.finished(exchange, 10.0)

    def __call__(self, name: str, **labels: str) -> float | None:
        return self.catalog.registry.get_sample_value(name, labels)

    def labels(self, name: str, label: str) -> set[str]:
        """Values a label has."""
        return {s.labels[label] for m in self.catalog.registry.collect() for s in m.samples if s.name == name}


def test_times_are_by_endpoint_and_model(clock: FakeClock) -> None:
    """Received to first byte, to the end, and between tokens on the average."""
    bench = Bench(clock)
    bench.finish()
    at = {"cluster": "c", "endpoint": "a", "model": "m"}
    assert bench("kvproxy_ttft_seconds_sum", **at, stream="true") == 1.0
    assert bench("kvproxy_request_duration_seconds_sum", **at) == 10.0
    assert bench("kvproxy_itl_seconds_sum", **at) == pytest.approx(1.0)


@pytest.mark.parametrize("outcome", [{"completion_tokens": 1}, {"completion_tokens": None}, {"ttft_s": None}])
def test_no_tokens_to_be_between(clock: FakeClock, outcome: dict[str, Any]) -> None:
    """One token, an unknown number of them, or no first byte; nor where the whole answer came at once."""
    bench = Bench(clock)
    bench.finish(**outcome)
    bench.finish(stream=False)
    at = {"cluster": "c", "endpoint": "a", "model": "m"}
    assert bench("kvproxy_ttft_seconds_count", **at, stream="false") == 1
    assert bench("kvproxy_itl_seconds_count", cluster="c", endpoint="a", model="m") == 0


def test_models_that_nobody_declares_share_one_label(clock: FakeClock) -> None:
    """A client may write any name; a route's pattern is no name."""
    bench = Bench(clock)
    for name in ("m", "alias", "wild*", "wildcat", "made-up-1", "made-up-2", ""):
        bench.finish(model=name)
    assert bench.labels("kvproxy_ttft_seconds_count", "model") == {"m", "alias", "other", ""}


def test_models_that_engines_list_have_names(clock: FakeClock) -> None:
    """With the shortest configuration, which names none; what no engine lists stays `other`."""
    bench = Bench(clock, models=(), served=frozenset({"listed"}).__contains__)
    for name in ("listed", "made-up"):
        bench.finish(model=name)
    assert bench.labels("kvproxy_ttft_seconds_count", "model") == {"listed", "other"}


@pytest.mark.parametrize(
    ("end", "status", "result"),
    [
        ("completed", 200, "ok"),
        ("completed", 500, "failed"),
        ("completed", 503, "failed"),
        ("local_reply", 502, "failed"),
        ("local_reply", 404, "client_error"),
        ("completed", 400, "client_error"),
        ("upstream_died", 200, "failed"),
        ("engine_error", 200, "failed"),
        ("", 0, "failed"),
        ("client_disconnected", 499, "client_left"),
    ],
)
def test_outcomes_of_a_request(clock: FakeClock, end: str, status: int, result: str) -> None:
    """One definition of failed, for page, status, log and alerts: a 5xx whichever way it came, or a broken answer."""
    assert result_of(end, status) == result
    bench = Bench(clock)
    bench.finish(end=end, status=status)
    assert {each: bench("kvproxy_request_results_total", cluster="c", result=each) for each in RESULTS} == {
        each: float(each == result) for each in RESULTS
    }


def test_models_of_one_endpoint_are_bounded(clock: FakeClock) -> None:
    """Even declared ones: discovery may declare more and more."""
    names = tuple(f"m{number}" for number in range(MAX_MODELS + 5))
    bench = Bench(clock, models=names)
    for name in names:
        bench.finish(model=name)
    shown = bench.labels("kvproxy_ttft_seconds_count", "model")
    assert len(shown) == MAX_MODELS + 1
    assert bench("kvproxy_ttft_seconds_count", cluster="c", endpoint="a", model="other", stream="true") == 5


def test_an_endpoint_that_left_takes_its_times_along(clock: FakeClock) -> None:
    """Late ends of its requests bring no series back."""
    bench = Bench(clock)
    bench.finish()
    a = bench.cluster.find_endpoint(A)
    assert a is not None
    bench.cluster.apply_endpoints(())
    bench.finish()
    assert a.metrics.find_latency("m") is None
    assert bench.labels("kvproxy_ttft_seconds_count", "endpoint") == set()


def test_a_request_that_reached_nobody_has_an_end_and_no_time(clock: FakeClock) -> None:
    """Nor tokens."""
    bench = Bench(clock)
    bench.finish(
        endpoint=None, ttft_s=None, prompt_tokens=None, cached_tokens=None, completion_tokens=None, end="local_reply"
    )
    bench.finish(cluster="", end="local_reply")
    assert bench("kvproxy_request_ends_total", end="local_reply") == 2
    assert bench.labels("kvproxy_ttft_seconds_count", "endpoint") == set()
    assert bench("kvproxy_prompt_tokens_total", cluster="c") == 0


def test_tiers_are_those_the_endpoint_was_believed_to_hold(clock: FakeClock) -> None:
    """Each apart, where the request went."""
    bench = Bench(clock)
    bench.finish()
    bench.finish(endpoint=EndpointId("b"))
    for tier, tokens in (("device", 400), ("host", 200)):
        assert bench("kvproxy_tier_hits_total", cluster="c", tier=tier) == 1
        assert bench("kvproxy_tier_hit_tokens_total", cluster="c", tier=tier) == tokens


def test_hit_ratios_follow_the_engines_counts(clock: FakeClock) -> None:
    """By tokens and by requests; an engine that does not say is not a miss."""
    bench = Bench(clock)
    assert bench("kvproxy_cache_hit_ratio", cluster="c", by="tokens") is None
    bench.finish()
    bench.finish(cached_tokens=0)
    bench.finish(cached_tokens=None)
    assert bench("kvproxy_cache_hit_ratio", cluster="c", by="tokens") == 0.3
    assert bench("kvproxy_cache_miss_ratio", cluster="c", by="tokens") == 0.7
    assert bench("kvproxy_cache_hit_ratio", cluster="c", by="requests") == 0.5
    assert bench("kvproxy_cache_window_requests", cluster="c") == 2
    assert bench("kvproxy_cached_tokens_total", cluster="c") == 600
    assert bench("kvproxy_prompt_tokens_total", cluster="c") == 3000


def test_savings_are_counted_by_model_and_tenant(clock: FakeClock) -> None:
    """Tokens always; seconds where the cluster's policy learns how long a prefill takes."""
    plain, learning = Bench(clock), Bench(clock, policy="kv_aware")
    for bench in (plain, learning):
        bench.finish(tenant="alice")
        bench.finish(tenant="alice", model="made-up")
        assert bench("kvproxy_saved_prompt_tokens_total", model="m", tenant="alice") == 600
        assert bench("kvproxy_saved_prompt_tokens_total", model="other", tenant="alice") == 600
    assert plain("kvproxy_saved_prefill_seconds_total", model="m", tenant="alice") == 0
    speeds = learning.cluster.speeds
    assert speeds is not None
    spared = learning("kvproxy_saved_prefill_seconds_total", model="m", tenant="alice")
    assert spared == pytest.approx(spared_s(600, speeds))


def test_no_seconds_are_saved_by_a_request_without_facts(clock: FakeClock) -> None:
    """Speeds are not learned from such requests, so they price none; the engine's count of tokens stands."""
    bench = Bench(clock, policy="kv_aware")
    bench.finish(facts=False)
    assert bench("kvproxy_saved_prompt_tokens_total", model="m", tenant="") == 600
    assert bench("kvproxy_saved_prefill_seconds_total", model="m", tenant="") == 0


def test_spared_seconds_are_the_difference_of_two_prefills(clock: FakeClock) -> None:
    """The whole prompt against what is left of it."""
    speeds = Bench(clock, policy="kv_aware").cluster.speeds
    assert speeds is not None
    _, token_s, attention_s, _ = speeds.seconds
    whole = 1000 * token_s + 1000 * 500 * attention_s
    rest = 400 * token_s + 400 * (600 + 200) * attention_s
    assert spared_s(600, speeds) == pytest.approx(whole - rest)


def test_pairs_of_model_and_tenant_are_bounded(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the bound they are counted together."""
    monkeypatch.setattr(savings, "MAX_PAIRS", 2)
    bench = Bench(clock)
    for tenant in ("t1", "t2", "t3", "t4", "t1"):
        bench.finish(tenant=tenant)
    assert bench("kvproxy_saved_prompt_tokens_total", model="m", tenant="t1") == 1200
    assert bench("kvproxy_saved_prompt_tokens_total", model="other", tenant="other") == 1200
