"""What engines say of their load: `/metrics` (vLLM or SGLang, 50 kB in one quick pass) and the ORCA header. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

_VLLM_PREFIX = b"vllm:"
_CACHE_CONFIG = b"cache_config_info"

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
}
_WANTED = frozenset(name for names in _NAMES.values() for name in names) | {_CACHE_CONFIG}

#: SGLang's name, or its name with a label's value -> vLLM's name of the same thing. Long prompts are prefilled in
#: chunks: each is a stage of its own, and only the last one counts as a prefill.
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
}
_STAGED = b"per_stage_req_latency_seconds_"

_STARTED = re.compile(rb"^process_start_time_seconds ([0-9.eE+]+)", re.MULTILINE)
#: A line of configuration has some thirty labels; there is one a data-parallel rank.
_MAX_CONFIG_BYTES, _MAX_CONFIGS = 8192, 256
_LABEL = re.compile(rb'(\w+)="((?:[^"\\]|\\.)*)"')
#: The data-parallel rank that a sample is of: vLLM's label, SGLang's. It counts over all servers of a deployment.
_RANK = re.compile(rb'[{,](?:engine|dp_rank)="([0-9]{1,5})"')


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """`cache_config_info` over all data-parallel ranks. None: this version does not say."""

    block_tokens: int | None  # tokens a KV block holds
    num_gpu_blocks: int | None  # summed
    capacity_tokens: int | None  # KV cache size, summed
    prefix_caching: bool | None  # on at every rank
    ranks: int


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """One scrape, over all data-parallel ranks and models of the engine. None: this version does not say."""

    kv_usage: float | None = None  # 0..1 of the fullest rank; blocks held by running requests only
    waiting: int | None = None  # requests, summed
    running: int | None = None
    prefix_queries_tokens: int | None = None  # counters since the engine's start, summed
    prefix_hits_tokens: int | None = None
    external_hits_tokens: int | None = None
    prompt_tokens: int | None = None
    prompt_tokens_cached: int | None = None
    generation_tokens: int | None = None
    prefills: int | None = None  # of requests that ended (vLLM) or were prefilled (SGLang)
    prefill_s: float | None = None  # what these took together, time in the queue left out
    prefill_tokens: int | None = None  # of their prompts, those that were not cached
    cache: CacheConfig | None = None
    started_at: float | None = None  # of the process, seconds since the epoch by the engine's clock
    #: The same of each data-parallel rank, where there are several.
    ranks: Mapping[int, EngineMetrics] = field(default_factory=dict)


@dataclass(slots=True)
class _Samples:
    """What the lines of one rank say, or of all."""

    values: dict[bytes, list[float]] = field(default_factory=dict)
    configs: list[dict[bytes, bytes]] = field(default_factory=list)


def parse_engine_metrics(text: bytes) -> EngineMetrics:
    """Reads the exposition text; lines it does not know or cannot read are passed over."""
    whole = _Samples()
    by_rank: dict[int, _Samples] = {}
    for line in text.split(b"\n"):
        if not line.startswith((_VLLM_PREFIX, _SGLANG_PREFIX)):
            continue
        name = _name(line)
        if name not in _WANTED:
            continue
        if name == _CACHE_CONFIG:
            if len(line) <= _MAX_CONFIG_BYTES and len(whole.configs) < _MAX_CONFIGS:
                config = dict(_LABEL.findall(line))
                for samples in _told_by(line, whole, by_rank):
                    samples.configs.append(config)
        elif (value := _value(line)) is not None:
            for samples in _told_by(line, whole, by_rank):
                samples.values.setdefault(name, []).append(value)
    started_at = _started_at(text)
    several = sorted(by_rank.items()) if len(by_rank) > 1 else ()
    ranks = {rank: _metrics(samples, started_at, {}) for rank, samples in several}
    return _metrics(whole, started_at, ranks)


def _told_by(line: bytes, whole: _Samples, by_rank: dict[int, _Samples]) -> Iterable[_Samples]:
    found = _RANK.search(line)
    if found is None:
        return (whole,)
    rank = int(found[1])
    of_rank = by_rank.get(rank)
    if of_rank is None:
        if len(by_rank) >= _MAX_CONFIGS:
            return (whole,)
        of_rank = by_rank[rank] = _Samples()
    return whole, of_rank


def _metrics(samples: _Samples, started_at: float | None, ranks: Mapping[int, EngineMetrics]) -> EngineMetrics:
    values = samples.values
    return EngineMetrics(
        kv_usage=_fold(values, "kv_usage", max),
        waiting=_total(values, "waiting"),
        running=_total(values, "running"),
        prefix_queries_tokens=_total(values, "prefix_queries_tokens"),
        prefix_hits_tokens=_total(values, "prefix_hits_tokens"),
        external_hits_tokens=_total(values, "external_hits_tokens"),
        prompt_tokens=_total(values, "prompt_tokens"),
        prompt_tokens_cached=_total(values, "prompt_tokens_cached"),
        generation_tokens=_total(values, "generation_tokens"),
        prefills=_total(values, "prefills"),
        prefill_s=_fold(values, "prefill_s", math.fsum),
        prefill_tokens=_total(values, "prefill_tokens"),
        cache=_cache_config(samples.configs),
        started_at=started_at,
        ranks=ranks,
    )


def _name(line: bytes) -> bytes:
    """What the sample is called, without the prefix; SGLang's under vLLM's name, and b"" for what is read elsewhere."""
    brace = line.find(b"{")
    name = line[line.find(b":") + 1 : brace if brace > 0 else line.find(b" ")]
    if line.startswith(_VLLM_PREFIX):
        return name
    staged = name.startswith(_STAGED)
    if not staged and name not in _SGLANG:
        return b""
    labels = dict(_LABEL.findall(line))
    if labels.get(b"tp_rank", b"0") != b"0" or labels.get(b"pp_rank", b"0") != b"0":
        return b""  # the ranks that work on one request together tell the same story
    return _SGLANG.get(name + b" " + labels.get(b"stage", b"") if staged else name, b"")


def _started_at(text: bytes) -> float | None:
    found = _STARTED.search(text)
    return None if found is None else _value(found[0])


def _value(line: bytes) -> float | None:
    """The sample's value: what follows the labels; a timestamp may follow it."""
    try:
        value = float(line[line.rfind(b"}") + 1 :].split()[0] if b"}" in line else line.split()[1])
    except (ValueError, IndexError):
        return None
    return value if math.isfinite(value) else None


def _fold(samples: dict[bytes, list[float]], field: str, fold: Callable[[Iterable[float]], float]) -> float | None:
    for name in _NAMES[field]:
        if name in samples:
            return fold(samples[name])
    return None


def _total(samples: dict[bytes, list[float]], field: str) -> int | None:
    value = _fold(samples, field, math.fsum)
    return None if value is None else int(value)


def _cache_config(configs: list[dict[bytes, bytes]]) -> CacheConfig | None:
    if not configs:
        return None
    blocks = [_number(config, b"num_gpu_blocks") for config in configs]
    block_tokens = next((size for config in configs if (size := _number(config, b"block_size"))), 0)
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
    """A label's whole number; 0 when the label is missing or says `None`."""
    text = config.get(label, b"")
    return int(text) if text.isdigit() else 0


#: Ask for the report with this request header.
ORCA_REQUEST_HEADER = (b"endpoint-load-metrics-format", b"JSON")
ORCA_RESPONSE_HEADER = b"endpoint-load-metrics"

_MAX_ORCA_BYTES, _ORCA_PREFIX = 4096, "named_metrics."


@dataclass(frozen=True, slots=True)
class OrcaLoad:
    """Load at the time of one response. None: not reported."""

    waiting: float | None
    kv_usage: float | None  # 0..1


class _Report(msgspec.Struct):
    named_metrics: dict[str, float]


_ORCA_DECODER = msgspec.json.Decoder(_Report)


def parse_orca(value: bytes) -> OrcaLoad | None:
    """The load in a header value, `JSON {...}` or `TEXT name=value, ...`; None when it is neither."""
    form, _, rest = value.strip()[:_MAX_ORCA_BYTES].partition(b" ")
    if form == b"JSON":
        metrics = _from_json(rest)
    elif form == b"TEXT":
        metrics = _from_text(rest.decode("latin-1"))
    else:
        return None
    if metrics is None:
        return None
    return OrcaLoad(waiting=metrics.get("num_requests_waiting"), kv_usage=metrics.get("kv_cache_usage_perc"))


def _from_json(text: bytes) -> dict[str, float] | None:
    try:
        return _ORCA_DECODER.decode(text).named_metrics
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _from_text(text: str) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for pair in text.split(","):
        name, _, number = pair.strip().partition("=")
        try:
            value = float(number)
        except ValueError:
            continue
        if math.isfinite(value):
            metrics[name.removeprefix(_ORCA_PREFIX)] = value
    return metrics
