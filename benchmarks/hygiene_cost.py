"""What looking for broken prefixes costs a request, for `benchmarks.prefix_hygiene`: with and without, in pairs."""

from __future__ import annotations

import json
import math
import random
import statistics
import time
from typing import Any

from benchmarks.hygiene_traffic import CLIENTS, Client, Dialogue
from kvproxy.cluster.cluster import Cluster
from kvproxy.config.cluster_schema import ClusterSettings, EndpointSettings
from kvproxy.config.kvcache_schema import KvCacheSettings
from kvproxy.filters.inference_request import KIND_OF_PATH
from kvproxy.kvcache.overlap.facts import Result
from kvproxy.kvcache.service import KvCache
from kvproxy.metrics.catalog import Metrics
from kvproxy.request.parse import parse_body
from kvproxy.types import EndpointId, InferenceRequest

#: Lines of the system prompt, and turns of a session.
SHAPES: dict[str, tuple[int, int]] = {
    "{} of 16 KB": (40, 8),
    "{} of 64 KB": (600, 8),
    "{} of 64 KB, 40 turns": (600, 40),
}
SESSIONS, REPEATS = 20, 9
ENDPOINT = EndpointId("a")


def measure_cost() -> list[tuple[str, float, float, float]]:
    """Traffic, microseconds of processor time a request without and with, and the median of their differences over
    sessions. Each session is served several times by either side in turn, and the least time counts: that is what the
    work takes when others leave the processor alone."""
    return [
        (shape.format(client.name), *_paired(client, lines, turns))
        for client in CLIENTS
        for shape, (lines, turns) in SHAPES.items()
    ]


def _service() -> tuple[KvCache, Cluster]:
    metrics = Metrics()
    settings = ClusterSettings(endpoints=(EndpointSettings(id="a", url="http://127.0.0.1:9"),))
    cluster = Cluster("default", settings, metrics=metrics, clock=time.monotonic, rng=random.Random(1))
    kvcache = KvCacheSettings.model_validate({"engine_metrics_interval": 0})
    return KvCache(kvcache, clusters={cluster.name: cluster}, metrics=metrics), cluster


def _paired(client: Client, lines: int, turns: int) -> tuple[float, float, float]:
    spent: dict[bool, list[float]] = {False: [], True: []}
    first = _session(client, lines, turns, random.Random(-1))
    for number in range(SESSIONS):
        session, least = _session(client, lines, turns, random.Random(number)), {False: math.inf, True: math.inf}
        for repeat in range(REPEATS):
            for looks in (False, True) if repeat % 2 else (True, False):
                service = _service()
                _serve(*service, first, looks=looks)  # what sessions share is known by then
                least[looks] = min(least[looks], _serve(*service, session, looks=looks))
        for looks, us in least.items():
            spent[looks].append(us / turns)
    without, with_ = (statistics.median(spent[looks]) for looks in (False, True))
    looking = statistics.median(b - a for a, b in zip(spent[False], spent[True], strict=True))
    return without, with_, looking


def _session(client: Client, lines: int, turns: int, rng: random.Random) -> list[tuple[InferenceRequest, bytes]]:
    dialogue = Dialogue.begun(rng, lines=lines, header=True)
    dialogue.tools = Dialogue.begun(random.Random(1)).tools  # those of the client
    found = []
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


def _serve(service: KvCache, cluster: Cluster, session: list[tuple[InferenceRequest, bytes]], *, looks: bool) -> float:
    """Microseconds for all of it."""
    breaks, held = service.state.breaks, 0
    began = time.thread_time_ns()
    for request, body in session:
        facts = service.gather(request, body, cluster=cluster)
        service.placed(facts, ENDPOINT)
        tokens = facts.prompt_bytes // 4
        result = Result(ENDPOINT, True, tokens, held // 16 * 16, request_id="r")
        service.finished(facts, result)
        if looks:
            assert breaks.finished(facts, result) is None
        held = tokens
    return (time.thread_time_ns() - began) / 1000
