"""Start options of a simulated vLLM server."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from kvproxy.lab.simulator.engine_io import EngineSettings
from kvproxy.lab.simulator.kv_event_publisher import PublisherSettings


class NixlPeer(Protocol):
    """An engine whose memory others read."""

    @property
    def dead(self) -> bool: ...
    def read(self, block: int) -> tuple[int, ...]:
        """Return the prompt whose KV is in a block."""
        ...

    def free(self, request_id: str) -> None:
        """End the hold on a prefill's blocks; what is in them stays until they are taken again."""
        ...


@dataclass(slots=True)
class NixlLinks:
    """Engines by engine id. `s_per_token` is the time of a pull."""

    lease_s: float = 30.0
    s_per_token: float = 0.000_02
    peers: dict[str, NixlPeer] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """Settings named after vLLM's own flags. `kv_events` None publishes nothing; `max_num_queued_reqs` None never
    refuses.

    `default_output_tokens` is the length of an answer that the client does not bound (it then ends with "stop").
    Without `word_pieces` the model has another tokenizer. With `refuse_priority` a request's `priority` is an error
    under fcfs, as in older versions. Without `multimodal` it refuses pictures. `rank` is the rank in its metrics.
    Engines with the same `nixl` read each other's KV."""

    model: str = "sim"
    root: str = "models/sim"
    loras: tuple[str, ...] = ()
    max_model_len: int = 32_768
    engine: EngineSettings = field(default_factory=lambda: EngineSettings(4096, 16, token_outputs=True))
    kv_events: PublisherSettings | None = None
    kv_events_replay: bool = True
    default_output_tokens: int = 128
    enable_prompt_tokens_details: bool = True
    max_num_queued_reqs: int | None = None
    version: str = "0.32.0"
    word_pieces: bool = True
    refuse_priority: bool = False
    multimodal: bool = True
    rank: int = 0
    nixl: NixlLinks | None = None

    def __post_init__(self) -> None:
        if not self.engine.token_outputs:
            raise ValueError("a streaming server needs an engine with token_outputs")

    @property
    def context_tokens(self) -> int:
        """The longest sequence served: the model's bound, or what the cache can hold."""
        return min(self.max_model_len, self.engine.capacity_blocks * self.engine.block_size)

    @property
    def models(self) -> tuple[str, ...]:
        """Every name a request may use, the base model first."""
        return (self.model, *self.loras)
