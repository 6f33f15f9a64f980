"""A kvcache service over fake engines and a fake LMCache, and prompts for it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from starlette.types import Receive, Scope, Send

from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.settings.compose import composed
from kvproxy.base.types import Clock, EndpointId, InferenceRequest, RequestKind, utc_seconds
from kvproxy.cache.actions.hotness import Hotness, KnownPrefix
from kvproxy.cache.feature import CacheFeature, find_reports
from kvproxy.cache.overlap.facts import RequestFacts, Result
from kvproxy.cache.overlap.reports import EngineReports
from kvproxy.cache.service import KvCache
from kvproxy.cache.settings import KvCacheSettings
from kvproxy.cache.state import CacheState
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.settings import ClusterSettings, EndpointSettings
from kvproxy.proxy.listener.server import serve
from kvproxy.proxy.request.parse import parse_body

A, B = EndpointId("a"), EndpointId("b")
NOWHERE = "http://127.0.0.1:9"

Route = Callable[[dict[str, Any]], Any] | Callable[[dict[str, Any]], Awaitable[Any]]


def words(text: str) -> list[int]:
    """Token ids as the fake engines make them: one a word, equal words equal."""
    return [sum(map(ord, word)) % 50_000 + 1 for word in text.split()]


def long_text(tag: str, count: int = 600) -> str:
    """Return a prompt of so many words."""
    return " ".join(f"{tag}{number}" for number in range(count))


class Fake:
    """A JSON-over-HTTP service; `routes` may be sync or async, and answer `(status, body)` or a body."""

    def __init__(self, routes: Mapping[str, Route]) -> None:
        self.routes = dict(routes)
        self.calls: Counter[str] = Counter()
        self.bodies: dict[str, list[dict[str, Any]]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        path = scope["path"]
        self.calls[path] += 1
        asked = json.loads(body or b"{}")
        self.bodies.setdefault(path, []).append(asked)
        route = self.routes.get(path)
        answer: Any = (404, {"detail": "Not Found"}) if route is None else route(asked)
        if asyncio.iscoroutine(answer):
            answer = await answer
        status, answer = answer if isinstance(answer, tuple) else (200, answer)
        raw = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(raw)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": raw})


def tokenize(asked: dict[str, Any]) -> dict[str, Any]:
    """Return the fake engines' `/tokenize`."""
    text = asked.get("prompt")
    if text is None:
        text = " ".join(f"<{message['role']}> {message['content']}" for message in asked["messages"])
    tokens = words(text)
    return {"count": len(tokens), "max_model_len": 100_000, "tokens": tokens}


def engine(**routes: Route) -> Fake:
    """Return an engine with `/tokenize`."""
    return Fake({"/tokenize": tokenize, **{f"/{name}": route for name, route in routes.items()}})


def controller(layout: Callable[[list[int]], dict[str, Any]], **routes: Route) -> Fake:
    """Return a controller whose lookups answer `layout(tokens)`, and whose actions work on all tokens."""

    def done(asked: dict[str, Any]) -> dict[str, Any]:
        return {"event_id": "x", "num_tokens": len(asked.get("tokens", [])) or 1}

    actions: dict[str, Route] = {f"/{name}": done for name in ("pin", "compress", "decompress", "clear")}
    return Fake(
        {
            "/lookup": lambda asked: {"event_id": "x", "layout_info": layout(asked["tokens"])},
            **actions,
            **{f"/{name}": route for name, route in routes.items()},
        }
    )


def copying(url: str, **transfers: Any) -> dict[str, Any]:
    """Return the filter's configuration with transfers on demand by this controller, and no deadline that a slow
    machine misses."""
    return {
        "lmcache_endpoint": url,
        "provider": "controller",
        "engine_metrics_interval": 0,
        "lookup_routing_timeout": "60s",
        "request_timeout": "60s",
        "transfers": {"on_demand": True, **transfers},
    }


def settings(**changes: Any) -> KvCacheSettings:
    """Return settings with the round of readings off, patience for lookups, and the sections of features."""
    patience = {"lookup_routing_timeout": 60.0} if changes.get("lmcache_endpoint") else {}
    return composed(KvCacheSettings).model_validate(
        {"engine_metrics_interval": 0, "request_timeout": 60.0, **patience, **changes}
    )


def cluster_of(
    urls: Mapping[str, str], *, clock: Clock = time.monotonic, instances: Mapping[str, str] | None = None, **fields: Any
) -> Cluster:
    """Return a cluster of these endpoints without probes."""
    endpoints = tuple(
        EndpointSettings(id=name, url=url, instance_id=(instances or {}).get(name, "")) for name, url in urls.items()
    )
    config = ClusterSettings(endpoints=endpoints, **fields)
    return Cluster("default", config, metrics=Metrics(), clock=clock, rng=random.Random(1))


def chat(*contents: str, **fields: Any) -> tuple[InferenceRequest, bytes]:
    """Return a chat whose messages are by user and assistant in turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[index % 2], "content": content} for index, content in enumerate(contents)]
    return parsed(RequestKind.CHAT, {"model": "m", "messages": messages, **fields})


def completion(prompt: Any) -> tuple[InferenceRequest, bytes]:
    """Return a completion request."""
    return parsed(RequestKind.COMPLETION, {"model": "m", "prompt": prompt})


def parsed(kind: RequestKind, body: dict[str, Any]) -> tuple[InferenceRequest, bytes]:
    raw = json.dumps(body).encode()
    request = parse_body(kind, raw)
    assert request is not None
    return request, raw


def messages(*contents: Any, **fields: Any) -> tuple[InferenceRequest, bytes]:
    """Return a request of Anthropic's API whose user and assistant take turns."""
    roles = ("user", "assistant")
    said = [{"role": roles[index % 2], "content": content} for index, content in enumerate(contents)]
    return parsed(RequestKind.MESSAGES, {"model": "m", "max_tokens": 1, "messages": said, **fields})


def tokens(count: int, *, start: int = 1) -> array[int]:
    """Consecutive token ids."""
    return array("I", range(start, start + count))


def count_uses(
    known: Hotness, *keys: int, now: float = 0.0, instance: str = "a", of: array[int] | None = None, times: int = 1
) -> list[KnownPrefix]:
    """Count uses of a prompt with these message prefixes; its tokens begin with its first key unless given."""
    used: list[KnownPrefix] = []
    for _ in range(times):
        used = known.count_use(list(keys), model="m", cache_salt="", instance=instance, now=now)
        known.learn_tokens(used, tokens(512, start=keys[0] * 10_000) if of is None else of)
    return used


class Service:
    """A kvcache service with its cluster, driven as the filter drives it."""

    def __init__(self, kv: KvCache, cluster: Cluster, metrics: Metrics) -> None:
        self.kv = kv
        self.cluster = cluster
        self.metrics = metrics

    async def ask(self, request: tuple[InferenceRequest, bytes]) -> RequestFacts:
        """Facts for a request."""
        return await self.kv.facts_for(*request, cluster=self.cluster)

    async def serve(
        self, request: tuple[InferenceRequest, bytes], endpoint: EndpointId, *, cached: int | None = None
    ) -> RequestFacts:
        """Serve a whole request: facts, the pick of `endpoint`, and a good answer."""
        facts = await self.ask(request)
        self.kv.placed(facts, endpoint)
        result = Result(endpoint, True, cached_tokens=cached)
        self.kv.finished(facts, result)
        for learned in self.kv.observers.learned:
            learned(facts, result)
        return facts

    async def settled(self) -> None:
        """All background work is done."""
        await self.kv.actions.jobs.settled()

    def metric(self, name: str, **labels: str) -> float:
        """Return a sample; 0 when it was never counted."""
        return self.metrics.registry.get_sample_value(name, labels) or 0.0


@contextlib.asynccontextmanager
async def running(
    config: KvCacheSettings,
    cluster: Cluster,
    *,
    clock: Clock = time.monotonic,
    wall_clock: Clock = utc_seconds,
    state: CacheState | None = None,
    features: Sequence[CacheFeature] | None = None,
) -> AsyncIterator[Service]:
    """Yield a service, entered, and read by its gauges; `state` may be that of an earlier one. With `features` no
    engine's reports are followed."""
    metrics = Metrics()
    clusters = {cluster.name: cluster}
    follows = find_reports(config) if features is None else None
    reports = EngineReports({}) if follows is None else follows(clusters, metrics=metrics, clock=clock)
    kv = KvCache(
        config,
        clusters=clusters,
        metrics=metrics,
        clock=clock,
        wall_clock=wall_clock,
        state=state,
        reports=reports,
        features=features,
        rng=random.Random(1),
    )
    async with reports, kv:
        kv.bind_gauges()
        yield Service(kv, cluster, metrics)


@contextlib.asynccontextmanager
async def world(
    engines: Mapping[str, Fake],
    lmcache: Fake | None = None,
    *,
    clock: Clock = time.monotonic,
    instances: Mapping[str, str] | None = None,
    features: Sequence[CacheFeature] | None = None,
    **changes: Any,
) -> AsyncIterator[Service]:
    """Engines and LMCache on loopback, and a service that knows them; `changes` are settings."""
    async with contextlib.AsyncExitStack() as stack:

        async def served(fake: Fake) -> str:
            return await stack.enter_async_context(serve(fake, drain_s=0.01, cut_grace_s=0.01))

        urls = {name: await served(fake) for name, fake in engines.items()}
        if lmcache is not None:
            changes = {"lmcache_endpoint": await served(lmcache), **changes}
        cluster = cluster_of(urls, clock=clock, instances=instances)
        service = running(settings(**changes), cluster, clock=clock, features=features)
        yield await stack.enter_async_context(service)


def service_of(clock: Clock, *, metrics: Metrics | None = None, **settings: object) -> KvCache:
    """Return a service over one cluster with the endpoints a and b."""
    endpoints = tuple(EndpointSettings(id=name, url=f"http://127.0.0.1:{port}") for name, port in (("a", 1), ("b", 2)))
    metrics = metrics or Metrics()
    cluster = Cluster(
        "c", ClusterSettings(endpoints=endpoints), metrics=metrics, clock=clock, rng=random.Random(1), sources=()
    )
    kv = KvCache(KvCacheSettings(**settings), clusters={"c": cluster}, metrics=metrics, clock=clock)  # type: ignore[arg-type]
    kv.bind_gauges()
    return kv


async def served(
    service: Service, request: tuple[InferenceRequest, bytes], *, prompt_tokens: int | None = None
) -> RequestFacts:
    """Serve a whole request that the engine counted `prompt_tokens` in, and the queries after it."""
    facts = await service.ask(request)
    service.kv.placed(facts, A)
    service.kv.finished(facts, Result(A, True, prompt_tokens=prompt_tokens))
    await service.settled()
    return facts


def tokenized(service: Service, outcome: str) -> float:
    """Return how many questions for tokens had this outcome."""
    return service.metric("kvproxy_kvcache_tokenizes_total", outcome=outcome)


def nobody(_: list[int]) -> dict[str, Any]:
    """Answer of an LMCache where no instance holds these tokens."""
    return {}
