"""Input and output of a simulated engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from kvproxy.lab.simulator.media import PlacedMedium
from kvproxy.lab.simulator.retention import Eviction, TierSettings
from kvproxy.lab.simulator.timing import EngineTiming, TokenGaps

#: Extra keys of one block, as an event shows them: the LoRA name (every block), the media in it, and the cache salt
#: (first block only).
ExtraKeys = tuple[str | tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class BlockStored:
    """A run of consecutive blocks became reusable; `parent` is the hash before the first one (None at the start).

    Of another `group` than that of full attention, `kind` shows which, only those with hashes did: the tokens are those
    of all blocks of the run."""

    block_hashes: tuple[int, ...]
    parent: int | None
    token_ids: tuple[int, ...] = ()
    lora_id: int | None = None
    lora_name: str | None = None
    extra_keys: tuple[ExtraKeys | None, ...] = ()
    group: int = 0
    kind: str = "full_attention"
    medium: str = "GPU"


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """One block left the cache."""

    block_hash: int
    group: int = 0
    medium: str = "GPU"


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The whole prefix cache was dropped."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class Scheduling(StrEnum):
    """In which order what waits is admitted, and which runner is given up when memory runs out: vLLM's policies."""

    FCFS = "fcfs"  # the earliest arrival; the newest runner
    PRIORITY = "priority"  # the lowest priority, then the earliest arrival; the runner that comes last by the same


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """One engine: its cache, its scheduler's bounds, its speed.

    `token_outputs` reports every token (a streaming server needs that); without it stretches of pure decoding are
    one calculation. `kv_events` turns the reports of stored and removed blocks on. Without `prefix_caching` nothing is
    kept, looked for, counted or reported. A prompt among others computes at most `long_prefill_token_threshold` tokens
    a step; 0: as many as the step has left. Reports of stored blocks name `lookahead_tokens` beyond the last of them.
    Requests of `max_loras` adapters run at a time (0: of all), and to
    load one takes `lora_load_s`. `tiers` get what is stored, and evict in the order of `eviction`."""

    capacity_blocks: int = 1600
    block_size: int = 512
    max_batched_tokens: int = 2048
    max_sequences: int = 256
    scheduling: Scheduling = Scheduling.FCFS
    long_prefill_token_threshold: int = 0
    timing: EngineTiming = field(default_factory=EngineTiming)
    token_outputs: bool = False
    kv_events: bool = True
    prefix_caching: bool = True
    lookahead_tokens: int = 0
    max_loras: int = 0
    lora_load_s: float = 0.0
    tiers: tuple[TierSettings, ...] = ()
    eviction: Eviction = Eviction.LRU

    def __post_init__(self) -> None:
        if self.capacity_blocks < 1 or self.block_size < 1:
            raise ValueError("capacity and block size must be at least 1")
        if self.max_sequences < 1 or self.max_batched_tokens <= self.max_sequences:
            raise ValueError("max_batched_tokens must exceed max_sequences, which must be at least 1")
        if self.long_prefill_token_threshold < 0:
            raise ValueError("long_prefill_token_threshold must not be negative")


@dataclass(frozen=True, slots=True)
class SimRequest:
    """One generation. `block_hashes` names the full blocks of the prompt, in order, each hash standing for the whole
    prefix up to its block; hashes beyond the prompt name blocks that decoding will fill. `token_ids`, where given,
    are the prompt's and the output's ids and only travel into events."""

    id: str
    block_hashes: Sequence[int]
    prompt_tokens: int
    output_tokens: int
    token_ids: Sequence[int] = ()
    lora_id: int | None = None
    lora_name: str | None = None
    cache_salt: str | None = None
    finish_reason: str = "length"
    priority: int = 0  # lower first, where the engine schedules by it
    media: tuple[PlacedMedium, ...] = ()  # in the prompt
    pulled_tokens: int = 0  # of the prompt, from another engine

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.output_tokens < 1:
            raise ValueError("a request needs at least one prompt token and one output token")


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The prefill is done and the first token is out."""

    request_id: str
    at: float
    cached_tokens: int
    submitted_at: float
    admitted_at: float


@dataclass(frozen=True, slots=True)
class Tokens:
    """`generated` tokens of the output exist now, the first included (with `token_outputs` only)."""

    request_id: str
    at: float
    generated: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The last token is out and the sequence's blocks are free."""

    request_id: str
    at: float
    output_tokens: int
    reason: str


@dataclass(frozen=True, slots=True)
class Rejected:
    """The request cannot fit this engine's cache even when it is alone."""

    request_id: str
    at: float


@dataclass(frozen=True, slots=True)
class Preempted:
    """The sequence lost its blocks to older ones and waits to be computed again."""

    request_id: str
    at: float


@dataclass(frozen=True, slots=True)
class CacheChanged:
    """Cache events of one step, in order."""

    at: float
    events: tuple[KvEvent, ...]


EngineOutput = FirstToken | Tokens | Finished | Rejected | Preempted | CacheChanged


@dataclass(slots=True)
class EngineCounters:
    """Running totals, in the meaning of vLLM's counters of the same names."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    external_prefix_cache_hits: int = 0  # tokens read from lower tiers
    preemptions: int = 0
    steps: int = 0
    token_gaps: TokenGaps = field(default_factory=TokenGaps)


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How busy an engine is: `kv_usage` (0 to 1) counts blocks of running sequences only."""

    running: int
    waiting: int
    kv_usage: float
