"""Checks of `kvproxy doctor`: the canary on each pair of endpoints, and the connector that the engines have."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from kvproxy.base.errors import ClientError
from kvproxy.base.settings.compose import part_of
from kvproxy.base.upstream.origin import Origin
from kvproxy.base.upstream.pool import UpstreamPool
from kvproxy.cache.clients.vllm import MAX_METRICS_BYTES
from kvproxy.cluster.settings import EndpointRole
from kvproxy.features.disaggregation.canary import Canary
from kvproxy.features.disaggregation.connectors import CONNECTORS
from kvproxy.features.disaggregation.connectors.sglang import MODES, ServerInfo
from kvproxy.features.disaggregation.findings import FIXES
from kvproxy.features.disaggregation.pairs import PairState
from kvproxy.features.disaggregation.settings import Connector, DisaggregationPlace
from kvproxy.operate.doctor.deployment import ClusterFacts
from kvproxy.operate.doctor.engine import EngineFacts
from kvproxy.operate.doctor.report import Finding, check, ok, problem, warning

#: Pairs that are examined, at most.
MAX_PAIRS = 16
_TIMEOUT_S = 30.0
_NIXL_METRICS = b"\nvllm:nixl_"


@dataclass(frozen=True, slots=True)
class VisitedEngine:
    """An engine of the configuration, as the canary asks it."""

    origin: Origin
    authorization: bytes | None
    rank: int | None = None


@check("disaggregation", calls=12 * MAX_PAIRS)
async def check_pairs(cluster: ClusterFacts) -> Sequence[Finding]:
    """16 greedy tokens, separated and at the decoder alone."""
    engines = cluster.engines
    prefillers = [one for one in engines if one.endpoint.role is not EndpointRole.DECODE]
    decoders = [one for one in engines if one.endpoint.role is not EndpointRole.PREFILL]
    pairs = [(p, d) for p in prefillers for d in decoders if p is not d]
    if not pairs:
        fix = "set `role: prefill` and `role: decode` of endpoints"
        return [warning(cluster.where, "has no pair of endpoints for `disaggregation`", fix)]
    async with UpstreamPool() as pool:
        return [await _examine(cluster, pool, *pair) for pair in pairs[:MAX_PAIRS]]


async def _examine(cluster: ClusterFacts, pool: UpstreamPool, prefill: EngineFacts, decode: EngineFacts) -> Finding:
    settings = part_of(cluster.settings, DisaggregationPlace).disaggregation
    tools = cluster.deployment.tools
    connector = CONNECTORS[settings.connector](settings.bootstrap_port, tools.rng)
    canary = Canary(connector, pool=pool, rng=tools.rng, timeout_s=_TIMEOUT_S, clock=tools.clock)
    models = await decode.list_models()
    model = models[0].id if models else ""
    verdict = await canary.examine(_visit(prefill), _visit(decode), (prefill.vllm, decode.vllm), model)
    what = f"prefill at {prefill.endpoint.id} for {decode.endpoint.id}"
    if verdict.state is PairState.GOOD:
        link = f"; {1000 * verdict.s_per_token:.3g} ms to pull a token" if verdict.s_per_token else ""
        return ok(cluster.where, f"{what} gives the same tokens as {decode.endpoint.id} alone{link}")
    found = await find_connector(prefill)
    if found not in (None, settings.connector):
        what = f"{what} does not work by {settings.connector.value}: the engine's connector is {found.value}"
        return problem(cluster.where, what, _set_to(found))
    if verdict.state is None:
        return problem(cluster.where, f"{what} fails: {verdict.why}", "see the logs of both engines")
    return problem(cluster.where, f"{what} does not work: {verdict.why}", FIXES[verdict.state])


@check("disaggregation", calls=2)
async def check_connector(cluster: ClusterFacts) -> Sequence[Finding]:
    """Find the connector of a cluster whose endpoints have roles, while `connector` is off."""
    prefillers = [one for one in cluster.engines if one.endpoint.role is EndpointRole.PREFILL]
    found = await find_connector(prefillers[0]) if prefillers else None
    if found is None:
        return []
    what = f"{prefillers[0].endpoint.id} prefills for no endpoint, though its engine's connector is {found.value}"
    return [warning(cluster.where, what, _set_to(found))]


async def find_connector(engine: EngineFacts) -> Connector | None:
    """Return the connector that an engine shows, by vLLM's metrics of NIXL or SGLang's mode; None: it shows none.
    Nothing is tried: parameters of another connector can end an engine."""
    timeout_s = engine.tools.timeouts.exchange_s
    with contextlib.suppress(ClientError):
        metrics = await engine.api.call("GET", "/metrics", timeout_s=timeout_s, max_bytes=MAX_METRICS_BYTES)
        if _NIXL_METRICS in metrics:
            return Connector.NIXL
    with contextlib.suppress(ClientError):
        info = await engine.api.get("/server_info", ServerInfo, timeout_s=timeout_s)
        if info.disaggregation_mode in MODES:
            return Connector.SGLANG
    return None


def _set_to(connector: Connector) -> str:
    return f"set `disaggregation: {{connector: {connector.value}}}`"


def _visit(engine: EngineFacts) -> VisitedEngine:
    key = engine.endpoint.api_key
    return VisitedEngine(engine.origin, None if key is None else b"Bearer " + key.get_secret_value().encode())
