"""Cost of looking for broken prefixes per request, for `benchmarks.prefix_hygiene`: with and without, in pairs."""

from __future__ import annotations

import json
import math
import random
import statistics
import time
from dataclasses import dataclass
from typing import Any

from benchmarks.hygiene_traffic import CLIENTS, Client, Dialogue
from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import EndpointId, InferenceRequest
from kvproxy.cache.overlap.facts import RequestFacts, Result
from kvproxy.cache.service import KvCache
from kvproxy.cache.settings import KvCacheSettings
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.settings import ClusterSettings, EndpointSettings
from kvproxy.features.hygiene.prefix_breaks import PrefixBreaks
from kvproxy.proxy.filters.inference_request import KIND_OF_PATH
from kvproxy.proxy.request.parse import parse_body

#: Lines of the system prompt, and turns of a session.
SHAPES: dict[str, tuple[int, int]] = {
    "{} of 16 KB": (40, 8),
    "{} of 64 KB": (600, 8),
    "{} of 64 KB, 40 turns": (600, 40),
}
SESSIONS, REPEATS = 6, 25
SIDES = ("without", "nothing", "looks")
ENDPOINT = EndpointId("a")


@dataclass(frozen=True)
class Cost:
    """Microseconds a request: the service's whole work without looking, what looking adds to it, what
    a call that does nothing adds to it, what looking takes by itself, again and again; and its call between other work,
    at a session's first turn and at later ones."""

    traffic: str
    without: float
    added: float
    nothing: float
    alone: float
    first: float
    later: float


def measure_cost() -> list[Cost]:
    """Of each kind of traffic, medians over sessions. Each session is served many times by either side in turn, and of
    each of its requests the least time counts: whatever else the machine does makes one longer, never shorter."""
    return [
        _paired(shape.format(client.name), client, lines, turns)
        for client in CLIENTS
        for shape, (lines, turns) in SHAPES.items()
    ]


def _service() -> tuple[KvCache, Cluster]:
    metrics = Metrics()
    settings = ClusterSettings(endpoints=(EndpointSettings(id="a", url="http://127.0.0.1:9"),))
    cluster = Cluster("default", settings, metrics=metrics, clock=time.monotonic, rng=random.Random(1))
    kvcache = KvCacheSettings.model_validate({"engine_metrics_interval": 0})
    return KvCache(kvcache, clusters={cluster.name: cluster}, metrics=metrics), cluster


def _paired(traffic: str, client: Client, lines: int, turns: int) -> Cost:
    spent: dict[str, list[float]] = {side: [] for side in SIDES}
    first_calls, later_calls = list[float](), list[float]()
    first = _session(client, lines, turns, random.Random(-7))
    for number in range(SESSIONS):
        session = _session(client, lines, turns, random.Random(number))
        least = {side: [math.inf] * turns for side in SIDES}
        calls = [math.inf] * turns
        for repeat in range(REPEATS):
            for side in SIDES if repeat % 2 else reversed(SIDES):
                service = _service()
                _serve(*service, first, side=side)  # what sessions share is known by then
                took, looked = _serve(*service, session, side=side)
                least[side] = list(map(min, least[side], took))
                if side == "looks":
                    calls = list(map(min, calls, looked))
        first_calls.append(calls[0])
        later_calls.append(sum(calls[1:]) / (turns - 1))
        for side, us in least.items():
            spent[side].append(sum(us) / turns)

    def added(side: str) -> float:
        return statistics.median(b - a for a, b in zip(spent["without"], spent[side], strict=True))

    return Cost(
        traffic, statistics.median(spent["without"]), added("looks"), added("nothing"), _alone(client, lines, turns),
        statistics.median(first_calls), statistics.median(later_calls),
    )  # fmt: skip


def _breaks_of(service: KvCache) -> PrefixBreaks:
    observer = service.observers.by_feature["hygiene"]
    assert isinstance(observer, PrefixBreaks)
    return observer


def _alone(client: Client, lines: int, turns: int) -> float:
    """One session's looking, begun and forgotten again and again."""
    service, cluster = _service()
    told: list[tuple[RequestFacts, Result]] = []
    for request, body in _session(client, lines, turns, random.Random(1)):
        facts = service.gather(request, body, cluster=cluster)
        facts.started_at = math.inf
        held = told[-1][1].prompt_tokens or 0 if told else 0
        told.append((facts, Result(ENDPOINT, True, facts.prompt_bytes // 4, held // 16 * 16, request_id="r")))
    breaks, least = _breaks_of(service), math.inf
    for _ in range(200):
        began = time.thread_time_ns()
        for facts, result in told:
            breaks.learned(facts, result)
        least = min(least, (time.thread_time_ns() - began) / 1000 / turns)
        breaks.book.sessions.forget(("", told[0][0].request.session_key or ""))
    return least


def _session(client: Client, lines: int, turns: int, rng: random.Random) -> list[tuple[InferenceRequest, bytes]]:
    dialogue = Dialogue.begun(rng, lines=lines, header=True)
    dialogue.tools = Dialogue.begun(random.Random(1)).tools  # those of the client
    found = list[tuple[InferenceRequest, bytes]]()
    for turn in range(turns):
        if turn:
            dialogue.go_on(rng)
        body: Any = {
            **client.body(dialogue, rng),
            "session_id": f"{rng.random()}" if not found else found[0][0].session_key,
        }
        raw = json.dumps(body).encode()
        request = parse_body(KIND_OF_PATH[client.path], raw)
        assert request is not None
        found.append((request, raw))
    return found


def _serve(
    service: KvCache, cluster: Cluster, session: list[tuple[InferenceRequest, bytes]], *, side: str
) -> tuple[list[float], list[float]]:
    """Microseconds for each request of it, and of these for the call that looks."""
    finished, held = (_nothing if side == "nothing" else _breaks_of(service).learned), 0
    took, looked = list[float](), list[float]()
    for request, body in session:
        began = time.perf_counter_ns()
        facts = service.gather(request, body, cluster=cluster)
        service.placed(facts, ENDPOINT)
        tokens = facts.prompt_bytes // 4
        result = Result(ENDPOINT, True, tokens, held // 16 * 16, request_id="r")
        service.finished(facts, result)
        before = time.perf_counter_ns()
        if side != "without":
            finished(facts, result)
        over = time.perf_counter_ns()
        took.append((over - began) / 1000)
        looked.append((over - before) / 1000)
        held = tokens
    return took, looked


def _nothing(facts: RequestFacts, result: Result) -> None:
    pass
