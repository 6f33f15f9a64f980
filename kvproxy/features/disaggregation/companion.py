"""Sends canaries beside the proxy: to each pair before its first request, after a change of its engines, and sampled
while both are little busy."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Self

from kvproxy.base.background_task import TaskSet
from kvproxy.base.types import Clock
from kvproxy.base.upstream.pool import UpstreamPool
from kvproxy.cache.engines import Engines
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.endpoint import TAKING
from kvproxy.features.disaggregation.canary import Canary, Verdict
from kvproxy.features.disaggregation.pairs import RETRY_S, Pair, PairState, settle
from kvproxy.features.disaggregation.watch import Disaggregated, find_all
from kvproxy.operate.companion import Companion, Serving

#: Between two rounds; each pair that is due has its turn in one.
ROUND_S = 0.5
TIMEOUT_S = 30.0
#: Requests in flight at an endpoint up to which a canary that is not urgent is sent.
_IDLE = 1
_RESULTS = {
    PairState.GOOD: "equal",
    PairState.WRONG: "different",
    PairState.NO_EFFECT: "no_effect",
    PairState.VERSIONS: "versions",
    PairState.MODES: "modes",
    None: "failed",
}


class CanaryService(Companion):
    """Of all clusters. It also owns prefill legs that go on beside the decoder's."""

    def __init__(self, *, clock: Clock) -> None:
        self._clock = clock
        self._clusters: Mapping[str, Cluster] = {}
        self._tasks = TaskSet()
        self._pool = UpstreamPool(clock=clock)
        self._engines = Engines(self._pool, timeout_s=TIMEOUT_S)
        self._wanted = asyncio.Event()  # set while a cluster separates
        self._turn = asyncio.Lock()

    def follow(self, serving: Serving) -> None:
        """Follow the clusters of this configuration."""
        self._clusters = serving.clusters
        self._wanted.clear()
        for state in find_all(self._clusters.values()):
            state.tasks = self._tasks
            if state.connector is not None:
                self._wanted.set()

    async def __aenter__(self) -> Self:
        wanted = self._wanted.is_set()
        self._wanted = asyncio.Event()  # an earlier life may have been in another event loop
        self._turn = asyncio.Lock()
        if wanted:
            self._wanted.set()
        await self._tasks.__aenter__()
        await self._pool.__aenter__()
        self._tasks.start(self._run(), name="canaries")
        return self

    async def __aexit__(self, *_: object) -> None:
        for state in find_all(self._clusters.values()):
            state.tasks = None
        await self._tasks.__aexit__()
        await self._engines.__aexit__()
        await self._pool.__aexit__()

    async def _run(self) -> None:
        while True:
            await self._wanted.wait()
            await self.run_round()
            await asyncio.sleep(ROUND_S)

    async def run_round(self) -> None:
        """Examine the pairs whose canaries are due, one after the other."""
        async with self._turn:
            states = [one for one in find_all(self._clusters.values()) if one.connector is not None]
            self._engines.keep_only(endpoint.engine for state in states for endpoint in state.cluster.endpoints)
            for state in states:
                _meet(state, self._clock())
                while (pair := state.pairs.find_due(self._clock())) is not None and _is_time(
                    pair, state, self._clock()
                ):
                    await self._examine(state, pair)

    async def _examine(self, state: Disaggregated, pair: Pair) -> None:
        connector = state.connector
        if connector is None:
            return
        canary = Canary(connector, pool=self._pool, rng=state.tools.rng, timeout_s=TIMEOUT_S, clock=self._clock)
        clients = self._engines.client(pair.prefill.engine), self._engines.client(pair.decode.engine)
        idle = _is_idle(pair)
        verdict = await canary.examine(pair.prefill, pair.decode, clients, pair.model)
        if not (idle and _is_idle(pair)):  # other requests' time is no part of the price
            verdict = verdict._replace(s_per_token=None)
        state.metrics.canaries.labels(state.cluster.name, _RESULTS[verdict.state]).inc()
        self._conclude(state, pair, verdict)

    def _conclude(self, state: Disaggregated, pair: Pair, verdict: Verdict) -> None:
        now = self._clock()
        if verdict.state is None:  # an engine that does not answer has its own verdicts
            proven = verdict.late and pair.state is PairState.GOOD  # busy engines are late, and the pair was good
            settle(pair, pair.state if proven else PairState.UNPROVEN, verdict.why, next_at=now + RETRY_S)
        else:
            settle(pair, verdict.state, verdict.why, next_at=now + state.settings.canary)
            pair.s_per_token = verdict.s_per_token or pair.s_per_token


def _meet(state: Disaggregated, now: float) -> None:
    """Make all pairs of endpoints that are up known, so that they are examined before their first request."""
    endpoints = state.cluster.endpoints
    state.pairs.keep_only(endpoints)
    if state.connector is not None:
        state.connector.keep_only(endpoints)
    if not state.settings.canary:
        return
    up = [one for one in endpoints if one.condition(now) in TAKING]
    for decode in up:
        if decode.serves(""):
            for prefill in up:
                if prefill.prefills("") and prefill.engine is not decode.engine:
                    state.pairs.may_carry(prefill, decode, next(iter(sorted(decode.models)), ""))


def _is_time(pair: Pair, state: Disaggregated, now: float) -> bool:
    """Return whether to send the canary of a pair now: a sampled one waits for idle endpoints, up to its interval."""
    if pair.state is PairState.UNPROVEN or now - pair.due_at >= state.settings.canary:
        return True
    return _is_idle(pair)


def _is_idle(pair: Pair) -> bool:
    return max(pair.prefill.load.in_flight, pair.decode.load.in_flight) <= _IDLE
