"""Load reported in engines' `/metrics`, vLLM's or SGLang's, 50 kB in one quick pass, with the LoRA adapters in use.
Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

from kvproxy.cluster.adapters import LoraUse

_VLLM_PREFIX = b"vllm:"
_CACHE_CONFIG = b"cache_config_info"
#: `awake` is 0 while the engine sleeps, at whichever level; the other states are 1 where it gave its memory up (at
#: level 0 it only pauses).
_SLEEP = b"engine_sleep_state"
_AWAKE = b'sleep_state="awake"'
_GONE = _SLEEP + b" gone"

#: Field of EngineMetrics -> names in order of preference; a version may show several of them, only the first counts.
_NAMES: dict[str, tuple[bytes, ...]] = {
    "kv_usage": (b"kv_cache_usage_perc", b"gpu_cache_usage_perc"),
    "waiting": (b"num_requests_waiting",),
    "running": (b"num_requests_running",),
    "prefix_queries_tokens": (
        b"prefix_cache_queries_total",
        b"prefix_cache_queries",
        b"gpu_prefix_cache_queries_total",
        b"gpu_prefix_cache_queries",
    ),
    "prefix_hits_tokens": (
        b"prefix_cache_hits_total",
        b"prefix_cache_hits",
        b"gpu_prefix_cache_hits_total",
        b"gpu_prefix_cache_hits",
    ),
    "external_hits_tokens": (b"external_prefix_cache_hits_total",),
    "prompt_tokens": (b"prompt_tokens_total",),
    "prompt_tokens_cached": (b"prompt_tokens_cached_total",),
    "generation_tokens": (b"generation_tokens_total",),
    "prefills": (b"request_prefill_time_seconds_count",),
    "prefill_s": (b"request_prefill_time_seconds_sum",),
    "prefill_tokens": (b"request_prefill_kv_computed_tokens_sum",),
    "awake": (_SLEEP,),
    "gone": (_GONE,),
    "page_tokens": (b"page_size",),
    "pages": (b"num_pages",),
    "room_tokens": (b"max_total_num_tokens",),
}
_WANTED = frozenset(name for names in _NAMES.values() for name in names) | {_CACHE_CONFIG}

#: SGLang's name, or its name with a label's value -> vLLM's name of the same thing (or its own, where vLLM has none).
#: Long prompts are prefilled in chunks: each is a stage of its own, and only the last one counts as a prefill.
_SGLANG_PREFIX = b"sglang:"
_SGLANG: dict[bytes, bytes] = {
    b"token_usage": b"kv_cache_usage_perc",
    b"num_queue_reqs": b"num_requests_waiting",
    b"num_running_reqs": b"num_requests_running",
    b"prompt_tokens_total": b"prompt_tokens_total",
    b"cached_tokens_total": b"prompt_tokens_cached_total",
    b"generation_tokens_total": b"generation_tokens_total",
    b"per_stage_req_latency_seconds_count prefill_forward": b"request_prefill_time_seconds_count",
    b"per_stage_req_latency_seconds_sum prefill_forward": b"request_prefill_time_seconds_sum",
    b"per_stage_req_latency_seconds_sum chunked_prefill": b"request_prefill_time_seconds_sum",
    b"realtime_tokens_total prefill_compute": b"request_prefill_kv_computed_tokens_sum",
    b"page_size": b"page_size",
    b"num_pages": b"num_pages",
    b"max_total_num_tokens": b"max_total_num_tokens",
    _CACHE_CONFIG: _CACHE_CONFIG,
}
#: Names of SGLang that a label's value completes.
_COMPLETED = (b"per_stage_req_latency_seconds_count", b"per_stage_req_latency_seconds_sum", b"realtime_tokens_total")
#: Its labels of that kind.
_COMPLETES = re.compile(rb'[{,](?:stage|mode)="([^"]*)"')

#: Cached prompt tokens by source: the metric of vLLM and that of SGLang, and the common names of the places.
_BY_SOURCE = (b"prompt_tokens_cached_by_source_total", b"cached_tokens_total")
_SOURCE = re.compile(rb'[{,](?:cache_)?source="([^"]*)"')
_PLACES = {b"device": "device", b"host": "host", b"disk": "disk", b"storage": "shared", b"p2p": "peer"}
#: Tokens from a connector that does not report their source: LMCache's.
UNSPECIFIED = "unspecified"
_CAME_FROM = {name: b"came from " + name.encode() for name in (*_PLACES.values(), UNSPECIFIED)}

#: A larger number is no count: doubles no longer represent it exactly.
_MOST = 2.0**53
_MAX_DIGITS = 15

_STARTED = re.compile(rb"^process_start_time_seconds ([0-9.eE+]+)", re.MULTILINE)
#: A line of configuration has some thirty labels; there is one a data-parallel rank.
_MAX_CONFIG_BYTES = 8192
_MAX_CONFIGS = 256
_LABEL = re.compile(rb'(\w+)="((?:[^"\\]|\\.)*)"')
#: The data-parallel rank that a sample is of: vLLM's label, SGLang's. It counts over all servers of a deployment.
_RANK = re.compile(rb'[{,](?:engine|dp_rank)="([0-9]{1,5})"')
#: SGLang's processes that work on one request together, each with the same story. Those of a data-parallel rank need
#: not begin at 0.
_SHARD = re.compile(rb'[{,](pp_rank|tp_rank)="([0-9]{1,5})"')


class EngineKind(StrEnum):
    """Kind of an engine, which decides the spelling of flags."""

    VLLM = "vLLM"
    SGLANG = "SGLang"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """KV cache over all data-parallel ranks. None: not reported by this version."""

    block_tokens: int | None  # tokens a KV block holds
    num_gpu_blocks: int | None  # summed
    capacity_tokens: int | None  # KV cache size, summed
    prefix_caching: bool | None  # on at every rank
    ranks: int


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """One scrape, over all data-parallel ranks and models of the engine. None: not reported by this version."""

    kv_usage: float | None = None  # 0..1 of the fullest rank; blocks held by running requests only
    waiting: int | None = None  # requests, summed
    running: int | None = None
    prefix_queries_tokens: int | None = None  # counters since the engine's start, summed
    prefix_hits_tokens: int | None = None
    external_hits_tokens: int | None = None
    prompt_tokens: int | None = None
    prompt_tokens_cached: int | None = None
    cached_from: Mapping[str, int] = field(default_factory=dict)  # these, by tier, `peer` or UNSPECIFIED
    generation_tokens: int | None = None
    prefills: int | None = None  # of requests that ended (vLLM) or were prefilled (SGLang)
    prefill_s: float | None = None  # time of these together, without time in the queue
    prefill_tokens: int | None = None  # of their prompts, those that were not cached
    cache: CacheConfig | None = None
    started_at: float | None = None  # of the process, seconds since the epoch by the engine's clock
    kind: EngineKind = EngineKind.UNKNOWN
    lora: LoraUse | None = None  # of all ranks
    asleep: bool = False  # it serves no requests until it is woken, on every rank
    gave_up_cache: bool = False  # it sleeps so deeply that its KV memory is gone
    #: The same of each data-parallel rank, where there are several.
    ranks: Mapping[int, EngineMetrics] = field(default_factory=dict)


@dataclass(slots=True)
class _Samples:
    """Samples in the lines of one rank, or of all."""

    values: dict[bytes, list[float]] = field(default_factory=dict)
    configs: list[dict[bytes, bytes]] = field(default_factory=list)


class _Sample(NamedTuple):
    """A line that is wanted."""

    name: bytes  # vLLM's
    line: bytes
    rank: int | None
    shard: tuple[int, int] | None  # pipeline and tensor rank; None: of all of them


def parse_engine_metrics(text: bytes) -> EngineMetrics:
    """Read the exposition text; unknown or unreadable lines are skipped."""
    found = list(_samples(text))
    leaders: dict[int | None, tuple[int, int]] = {}
    for one in found:
        if one.shard is not None:
            leaders[one.rank] = min(one.shard, leaders.get(one.rank, one.shard))
    whole = _Samples()
    by_rank: dict[int, _Samples] = {}
    for one in found:
        if one.shard is not None and one.shard != leaders[one.rank]:
            continue
        if one.name == _CACHE_CONFIG:
            if len(one.line) <= _MAX_CONFIG_BYTES and len(whole.configs) < _MAX_CONFIGS:
                config = dict(_LABEL.findall(one.line))
                for samples in _told_by(one.rank, whole, by_rank):
                    samples.configs.append(config)
        elif (value := _value(one.line)) is not None:
            for samples in _told_by(one.rank, whole, by_rank):
                samples.values.setdefault(one.name, []).append(value)
    kind = EngineKind.UNKNOWN
    if found:
        kind = EngineKind.SGLANG if found[0].line.startswith(_SGLANG_PREFIX) else EngineKind.VLLM
    started_at = _started_at(text)
    several = sorted(by_rank.items()) if len(by_rank) > 1 else ()
    ranks = {rank: _metrics(samples, kind, started_at) for rank, samples in several}
    return replace(_metrics(whole, kind, started_at), ranks=ranks, lora=parse_lora_use(text))


def _samples(text: bytes) -> Iterator[_Sample]:
    for line in text.split(b"\n"):
        if line.startswith(_VLLM_PREFIX):
            name = _bare_name(line)
            if name in _BY_SOURCE:
                yield _Sample(_came_from(line), line, _rank(line), None)
            elif name in _WANTED:
                name = _GONE if name == _SLEEP and _AWAKE not in line else name
                yield _Sample(name, line, _rank(line), None)
        elif line.startswith(_SGLANG_PREFIX):
            name = _bare_name(line)
            if name in _COMPLETED:
                label = _COMPLETES.search(line)
                name += b" " + (label[1] if label is not None else b"")
            if name in _SGLANG:
                shard = {label: int(number) for label, number in _SHARD.findall(line)}
                place = (shard.get(b"pp_rank", 0), shard.get(b"tp_rank", 0)) if shard else None
                if name in _BY_SOURCE:
                    yield _Sample(_came_from(line), line, _rank(line), place)
                yield _Sample(_SGLANG[name], line, _rank(line), place)


def _bare_name(line: bytes) -> bytes:
    """Return what the sample is called, without the prefix."""
    brace = line.find(b"{")
    return line[line.find(b":") + 1 : brace if brace > 0 else line.find(b" ")]


def _came_from(line: bytes) -> bytes:
    """Return the source of a sample of cached tokens."""
    label = _SOURCE.search(line)
    return _CAME_FROM[UNSPECIFIED if label is None else _PLACES.get(label[1].partition(b"_")[0], UNSPECIFIED)]


def _rank(line: bytes) -> int | None:
    found = _RANK.search(line)
    return None if found is None else int(found[1])


def _told_by(rank: int | None, whole: _Samples, by_rank: dict[int, _Samples]) -> Iterable[_Samples]:
    if rank is None:
        return (whole,)
    of_rank = by_rank.get(rank)
    if of_rank is None:
        if len(by_rank) >= _MAX_CONFIGS:
            return (whole,)
        of_rank = by_rank[rank] = _Samples()
    return whole, of_rank


def _metrics(samples: _Samples, kind: EngineKind, started_at: float | None) -> EngineMetrics:
    values = samples.values
    prompt = _total(values, "prompt_tokens")
    cached = _total(values, "prompt_tokens_cached")
    queries = _total(values, "prefix_queries_tokens")
    hits = _total(values, "prefix_hits_tokens")
    if kind is EngineKind.SGLANG:  # it counts them as requests end, and a kind of hit from its first one on
        queries = prompt
        hits = cached or 0
    return EngineMetrics(
        kv_usage=_fold(values, "kv_usage", max),
        waiting=_total(values, "waiting"),
        running=_total(values, "running"),
        prefix_queries_tokens=queries,
        prefix_hits_tokens=None if queries is None else hits,
        external_hits_tokens=_total(values, "external_hits_tokens"),
        prompt_tokens=prompt,
        prompt_tokens_cached=cached,
        cached_from=_cached_from(values),
        generation_tokens=_total(values, "generation_tokens"),
        prefills=_total(values, "prefills"),
        prefill_s=_fold(values, "prefill_s", math.fsum),
        prefill_tokens=_total(values, "prefill_tokens"),
        cache=_told_cache(values, _cache_config(samples.configs)),
        started_at=started_at,
        kind=kind,
        asleep=_fold(values, "awake", max) == 0.0,
        gave_up_cache=_fold(values, "awake", max) == 0.0 and bool(_fold(values, "gone", max)),
    )


def _cached_from(values: dict[bytes, list[float]]) -> dict[str, int]:
    """By the sources' own counter; of an engine without one, its own memory and what a connector brought."""
    found = {place: int(math.fsum(values[name])) for place, name in _CAME_FROM.items() if name in values}
    own = _total(values, "prefix_hits_tokens")
    brought = _total(values, "external_hits_tokens")
    if found or own is None:
        return found
    return {"device": own, **({} if brought is None else {UNSPECIFIED: brought})}


def _started_at(text: bytes) -> float | None:
    found = _STARTED.search(text)
    return None if found is None else _value(found[0])


def _value(line: bytes) -> float | None:
    """Return the sample's value, which is none below 0: what follows the labels; a timestamp may follow it."""
    try:
        value = float(line[line.rfind(b"}") + 1 :].split()[0] if b"}" in line else line.split()[1])
    except (ValueError, IndexError):
        return None
    return value if 0.0 <= value <= _MOST else None


def _fold(samples: dict[bytes, list[float]], field: str, fold: Callable[[Iterable[float]], float]) -> float | None:
    for name in _NAMES[field]:
        if name in samples:
            return fold(samples[name])
    return None


def _total(samples: dict[bytes, list[float]], field: str) -> int | None:
    value = _fold(samples, field, math.fsum)
    return None if value is None else int(value)


def _told_cache(samples: dict[bytes, list[float]], info: CacheConfig | None) -> CacheConfig | None:
    """By SGLang's gauges, one of each a rank, and by `info` what older versions have no gauge for."""
    capacity = _total(samples, "room_tokens")
    pages = _total(samples, "pages")
    page_tokens = int(_fold(samples, "page_tokens", max) or 0)
    capacity = capacity or (pages or 0) * page_tokens
    if not capacity:
        return info
    if info is not None:
        page_tokens = page_tokens or info.block_tokens or 0
        pages = pages or info.num_gpu_blocks
    ranks = len(samples.get(b"max_total_num_tokens") or samples[b"num_pages"])
    return CacheConfig(page_tokens or None, pages, capacity, None, ranks)


def _cache_config(configs: list[dict[bytes, bytes]]) -> CacheConfig | None:
    """By the labels of `cache_config_info`: vLLM, and SGLang before it had gauges."""
    if not configs:
        return None
    blocks = [_number(config, b"num_gpu_blocks") or _number(config, b"num_pages") for config in configs]
    sizes = (_number(config, b"block_size") or _number(config, b"page_size") for config in configs)
    block_tokens = next((size for size in sizes if size), 0)
    capacity = [
        _number(config, b"kv_cache_size_tokens") or count * block_tokens
        for config, count in zip(configs, blocks, strict=True)
    ]
    caching = {config.get(b"enable_prefix_caching") for config in configs}
    return CacheConfig(
        block_tokens=block_tokens or None,
        num_gpu_blocks=sum(blocks) or None,
        capacity_tokens=sum(capacity) or None,
        prefix_caching=None if None in caching else caching == {b"True"},
        ranks=len(configs),
    )


def _number(config: dict[bytes, bytes], label: bytes) -> int:
    """Return a label's whole number; 0 when the label is missing or `None`."""
    text = config.get(label, b"")
    return int(text) if text.isdigit() and len(text) <= _MAX_DIGITS else 0


#: One line a combination ever seen; its value is the time of the last engine step that had it.
_LORA_LINE = re.compile(rb"^vllm:lora_requests_info\{([^}\n]{0,65536})\} ([0-9.eE+]{1,32})", re.MULTILINE)
#: Data-parallel ranks write in turn, each its own combination: lines this much older than the newest count as well.
_LORA_TOGETHER_S = 2.0
MAX_LORA_LINES = 10_000
MAX_LORA_NAMES = 1024


def parse_lora_use(text: bytes) -> LoraUse | None:
    """None: the engine serves no adapters, or ran none yet."""
    if b"vllm:lora_requests_info{" not in text:
        return None
    lines: list[tuple[float, bytes]] = []
    for found in _LORA_LINE.finditer(text):
        try:
            at = float(found[2])
        except ValueError:
            continue
        if math.isfinite(at):
            lines.append((at, found[1]))
        if len(lines) >= MAX_LORA_LINES:
            break
    if not lines:
        return None
    newest, latest = max(lines)
    slots = dict(_LABEL.findall(latest)).get(b"max_lora", b"")
    now = [dict(_LABEL.findall(labels)) for at, labels in lines if at >= newest - _LORA_TOGETHER_S]
    return LoraUse(
        int(slots) if slots.isdigit() and len(slots) < 10 else 0,
        _adapter_names([labels.get(b"running_lora_adapters", b"") for labels in now]),
        _adapter_names([labels.get(b"waiting_lora_adapters", b"") for labels in now]),
    )


def _adapter_names(lists: list[bytes]) -> frozenset[str]:
    names = {name.decode("utf-8", "replace") for each in lists for name in each.split(b",") if name}
    return frozenset(sorted(names)[:MAX_LORA_NAMES])
