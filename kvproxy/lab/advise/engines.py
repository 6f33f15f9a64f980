"""Engines' reports of their own settings: queried once, without generating tokens. None: not reported."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvproxy.base.errors import ClientError, NotSupported
from kvproxy.base.types import EndpointId, RequestKind
from kvproxy.cache.clients.engine_metrics import EngineKind, EngineMetrics, parse_engine_metrics
from kvproxy.cache.clients.sglang import SglangInfo
from kvproxy.operate.config.schema import Config
from kvproxy.operate.doctor.deployment import survey_deployment
from kvproxy.operate.doctor.engine import EngineFacts, read_samples, sum_buckets, sum_samples
from kvproxy.operate.doctor.tools import Tools

#: Steps of one size that are significant.
_STEPS = 20
_PROBE = b'{"messages": [{"role": "user", "content": "x"}]}'


@dataclass(frozen=True, slots=True)
class EngineSettingsSeen:
    """One engine, or one data-parallel rank of it. `error` shows why it could not be asked; "" where it could."""

    id: EndpointId
    cluster: str
    kind: EngineKind = EngineKind.UNKNOWN
    error: str = ""
    version: str = ""
    capacity_tokens: int | None = None
    block_tokens: int | None = None
    prefix_caching: bool | None = None
    memory_share: float | None = None  # of the GPU's, that it may take
    offloads: bool | None = None  # KV blocks to host memory
    step_tokens: int | None = None  # at most in one step
    sequences: int | None = None  # at most at a time
    by_priority: bool | None = None  # waiting requests are ordered by priority
    cache_report: bool | None = None  # answers report cached tokens
    preemptions: int | None = None  # since its start
    publishes: bool | None = None  # KV events
    replays: bool | None = None  # KV events that were missed
    renders: bool | None = None  # chats, to token ids
    metrics: EngineMetrics = field(default_factory=EngineMetrics)
    rank_of: EndpointId | None = None  # the engine, where this is a rank


async def ask_engines(config: Config, *, tools: Tools) -> list[EngineSettingsSeen]:
    """Query every configured engine and return the reports in the order of the configuration. Raises nothing of an
    engine's."""
    async with tools:
        deployment = await survey_deployment(config, tools=tools)
        return list(await asyncio.gather(*(_ask(engine) for engine in deployment.engines)))


async def _ask(engine: EngineFacts) -> EngineSettingsSeen:
    id_ = EndpointId(engine.endpoint.id)
    try:
        text = await engine.fetch_exposition()
    except ClientError as error:
        return EngineSettingsSeen(id_, engine.cluster, error=str(error))
    metrics = parse_engine_metrics(text)
    if metrics.kind is EngineKind.SGLANG:
        return await _sglang(engine, metrics)
    labels = next((sample.labels for sample in read_samples(text, "vllm:cache_config_info")), {})
    share = labels.get("gpu_memory_utilization", "")
    offload = labels.get("kv_offloading_size")
    publishes, replays = await _events(engine)
    cache = metrics.cache
    return EngineSettingsSeen(
        id_,
        engine.cluster,
        metrics.kind,
        version=await _version(engine),
        capacity_tokens=None if cache is None else cache.capacity_tokens,
        block_tokens=None if cache is None else cache.block_tokens,
        prefix_caching=None if cache is None else cache.prefix_caching,
        memory_share=float(share) if re.fullmatch(r"0?\.\d+|1\.0", share) else None,
        offloads=None if offload is None else offload != "None",
        step_tokens=_step_tokens(text),
        preemptions=None if (preempted := sum_samples(text, "vllm:num_preemptions_total")) is None else int(preempted),
        publishes=publishes,
        replays=replays,
        renders=await _renders(engine),
        metrics=metrics,
    )


async def _version(engine: EngineFacts) -> str:
    try:
        return await engine.fetch_version()
    except ClientError:
        return ""


async def _events(engine: EngineFacts) -> tuple[bool | None, bool | None]:
    """Return whether the engine publishes KV events, and whether it replays missed ones."""
    try:
        sources = await engine.list_sources()
    except ClientError:
        return None, None
    return bool(sources), all(source.replay_endpoint for source in sources) if sources else None


async def _renders(engine: EngineFacts) -> bool | None:
    try:
        await engine.vllm.render_prompt(RequestKind.CHAT, (await engine.choose_model()).id, _PROBE)
    except NotSupported:
        return False
    except ClientError:
        return None
    return True


def _step_tokens(text: bytes) -> int | None:
    """Return the largest step there was, by the histogram's bounds (powers of two, as budgets are): what steps may
    have, if prompts are long enough to fill one."""
    before = 0
    largest = None
    for bound, count in sorted(sum_buckets(text, "vllm:iteration_tokens_total").items()):
        if count - before >= _STEPS and 1 < bound < float("inf"):
            largest = int(bound)
        before = count
    return largest


async def _sglang(engine: EngineFacts, metrics: EngineMetrics) -> EngineSettingsSeen:
    try:
        info = await engine.vllm.sglang_info()
    except ClientError:
        info = SglangInfo()
    chunk = info.chunked_prefill_size
    sources = info.event_sources(host=engine.origin.host)
    return EngineSettingsSeen(
        EndpointId(engine.endpoint.id),
        engine.cluster,
        EngineKind.SGLANG,
        version=info.version,
        capacity_tokens=info.max_total_num_tokens,
        block_tokens=info.page_size,
        prefix_caching=None if info.disable_radix_cache is None else not info.disable_radix_cache,
        memory_share=info.mem_fraction_static,
        offloads=info.enable_hierarchical_cache,
        step_tokens=chunk if chunk is not None and chunk > 0 else None,
        sequences=info.max_running_requests,
        by_priority=info.enable_priority_scheduling,
        cache_report=info.enable_cache_report,
        publishes=None if info.page_size is None else bool(sources),
        replays=all(source.replay_endpoint for source in sources) if sources else None,
        metrics=metrics,
    )


def engines_of(
    seen: Sequence[EngineSettingsSeen], cluster: str, endpoints: Sequence[EndpointId]
) -> list[EngineSettingsSeen]:
    """Those of one pool, in the order of its endpoints; one that is not configured any more is left out."""
    by_id = {one.id: one for one in seen if one.cluster == cluster}
    found = (by_id.get(endpoint) or _rank(by_id, endpoint) for endpoint in endpoints)
    return [one for one in found if one is not None]


def _rank(by_id: Mapping[EndpointId, EngineSettingsSeen], endpoint: EndpointId) -> EngineSettingsSeen | None:
    """Return what an engine reports of one of its ranks, `ENGINE@RANK`."""
    name, _, rank = endpoint.rpartition("@")
    engine = by_id.get(EndpointId(name))
    own = engine.metrics.ranks.get(int(rank)) if engine is not None and rank.isdecimal() else None
    if engine is None or own is None:
        return None
    capacity = engine.capacity_tokens if own.cache is None else own.cache.capacity_tokens
    return replace(engine, id=endpoint, rank_of=engine.id, metrics=own, capacity_tokens=capacity)
