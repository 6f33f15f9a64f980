"""Settings of engines that matter to routing, each with the engine's own flag."""

from __future__ import annotations

from enum import StrEnum

from kvproxy.cache.clients.engine_metrics import EngineKind

#: vLLM's flag for KV events, a gap of which can be filled.
EVENTS_FLAG = (
    '--kv-events-config \'{"enable_kv_cache_events": true, "publisher": "zmq", '
    '"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558", "topic": "kv-events"}\''
)
#: SGLang's has the same name and turns them on by itself.
SGLANG_EVENTS_FLAG = EVENTS_FLAG.replace('"enable_kv_cache_events": true, ', "")


class Setting(StrEnum):
    """A setting of an engine, or of kvproxy, that advice may be about."""

    PREFIX_CACHING = "prefix caching"
    CACHE_REPORT = "cached tokens in usage"
    KV_EVENTS = "KV events"
    REPLAY = "replay of KV events"
    RENDER = "rendering of chats"
    SCHEDULING = "scheduling by priority"
    STEP_TOKENS = "tokens a step"
    LONG_PREFILL = "long-prefill threshold"
    SEQUENCES = "sequences at a time"
    BLOCK_TOKENS = "block size"
    MEMORY = "KV memory"
    OFFLOAD = "KV offloading"
    POLICY = "policy"
    QUEUE = "router queue"


#: `{}` is the value.
_FLAGS: dict[Setting, dict[EngineKind, str]] = {
    Setting.PREFIX_CACHING: {
        EngineKind.VLLM: "--enable-prefix-caching",
        EngineKind.SGLANG: "without --disable-radix-cache",
    },
    Setting.CACHE_REPORT: {
        EngineKind.VLLM: "--enable-prompt-tokens-details",
        EngineKind.SGLANG: "--enable-cache-report",
    },
    Setting.KV_EVENTS: {EngineKind.VLLM: EVENTS_FLAG, EngineKind.SGLANG: SGLANG_EVENTS_FLAG},
    Setting.REPLAY: {EngineKind.VLLM: EVENTS_FLAG, EngineKind.SGLANG: SGLANG_EVENTS_FLAG},
    Setting.RENDER: {EngineKind.VLLM: "--enable-scale-out"},
    Setting.SCHEDULING: {
        EngineKind.VLLM: "--scheduling-policy priority",
        EngineKind.SGLANG: "--enable-priority-scheduling --disable-priority-preemption",
    },
    Setting.STEP_TOKENS: {
        EngineKind.VLLM: "--max-num-batched-tokens {}",
        EngineKind.SGLANG: "--chunked-prefill-size {}",
    },
    Setting.LONG_PREFILL: {EngineKind.VLLM: "--long-prefill-token-threshold {}"},
    Setting.SEQUENCES: {EngineKind.VLLM: "--max-num-seqs {}", EngineKind.SGLANG: "--max-running-requests {}"},
    Setting.BLOCK_TOKENS: {EngineKind.VLLM: "--block-size {}", EngineKind.SGLANG: "--page-size {}"},
    Setting.MEMORY: {EngineKind.VLLM: "--gpu-memory-utilization {}", EngineKind.SGLANG: "--mem-fraction-static {}"},
    Setting.OFFLOAD: {
        EngineKind.VLLM: "--kv-offloading-size GIB --kv-offloading-backend native",
        EngineKind.SGLANG: "--enable-hierarchical-cache --hicache-size GB",
    },
}


def spell_flag(setting: Setting, kind: EngineKind, value: object = "") -> str:
    """Return the engine's own spelling; "" where it has no such flag (an engine of unknown kind is taken for
    a vLLM)."""
    kind = EngineKind.VLLM if kind is EngineKind.UNKNOWN else kind
    return _FLAGS.get(setting, {}).get(kind, "").format(value) if value != "" else _FLAGS.get(setting, {}).get(kind, "")
