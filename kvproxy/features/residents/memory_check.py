"""Check of `kvproxy doctor` whether the engines show the memory by which sessions are admitted."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvproxy.cache.clients.engine_metrics import EngineKind, EngineMetrics, parse_engine_metrics
from kvproxy.operate.doctor.deployment import ClusterFacts, gather_facts
from kvproxy.operate.doctor.engine import EngineFacts
from kvproxy.operate.doctor.report import Finding, check, ok, warning

_FIX = (
    "sessions have no limit there: agents whose contexts exceed its memory evict each other's. Start a vLLM or SGLang "
    "whose /metrics have vllm:cache_config_info or sglang:max_total_num_tokens"
)


@check("session memory", calls=3)
async def check_session_memory(cluster: ClusterFacts) -> Sequence[Finding]:
    """One cluster's engines. Those that show no metrics of an engine are another check's."""
    found = await gather_facts(cluster.engines, _read)
    shown = {engine: one.cache.capacity_tokens for engine, one in found.items() if one.cache is not None}
    known = [engine for engine, one in found.items() if one.kind is not EngineKind.UNKNOWN and not one.asleep]
    silent = [engine for engine in known if not shown.get(engine)]
    total = sum(filter(None, shown.values()))
    room = [ok(cluster.where, f"sessions share KV memory of {total:,} tokens")] if total else []
    return [*room, *(warning(one.where, "its /metrics do not show its KV memory", _FIX) for one in silent)]


async def _read(engine: EngineFacts) -> EngineMetrics:
    return await asyncio.to_thread(parse_engine_metrics, await engine.fetch_exposition())
