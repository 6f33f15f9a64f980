"""What the adviser says: a setting with its exact flag, why, what it would gain and how sure that is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvproxy.clients.engine_metrics import EngineKind
from kvproxy.doctor.checks.kv_events import EVENTS_FLAG, SGLANG_EVENTS_FLAG


class Setting(StrEnum):
    """What can be advised on."""

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
    """The engine's own spelling; "" where it has no such flag (an engine of unknown kind is taken for a vLLM)."""
    kind = EngineKind.VLLM if kind is EngineKind.UNKNOWN else kind
    return _FLAGS.get(setting, {}).get(kind, "").format(value) if value != "" else _FLAGS.get(setting, {}).get(kind, "")


class Confidence(StrEnum):
    """How sure an expected gain is."""

    HIGH = "high"
    MEDIUM = "medium"
    LOW = "low"


@dataclass(frozen=True, slots=True)
class Ratio:
    """With the setting against without it: the mean over seeds and halves of the recording, and the standard deviation
    between these, as a factor less 1."""

    value: float
    spread: float


@dataclass(frozen=True, slots=True)
class Gain:
    """What replay of the recorded requests expects. `runs`: pairs of a seed and a half of the recording."""

    ttft_mean: Ratio
    ttft_p99: Ratio
    itl_p99: Ratio
    e2e_mean: Ratio
    runs: int
    confidence: Confidence
    at_most: bool = False  # the simulation leaves a cost of it out


@dataclass(frozen=True, slots=True)
class Advice:
    """One thing to set. `flags` are lines of an engine's command, by engines; `config` is kvproxy's own."""

    setting: Setting
    what: str
    flags: tuple[tuple[str, str], ...] = ()  # (endpoints, flag)
    config: str = ""
    gain: Gain | None = None  # None: it follows from what was seen, without a simulation


@dataclass(frozen=True, slots=True)
class NotGiven:
    """A setting that was simulated and is not recommended."""

    setting: Setting
    what: str
    gain: Gain
    reason: str
