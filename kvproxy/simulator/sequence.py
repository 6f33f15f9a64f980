"""One request inside an engine."""

from __future__ import annotations

from kvproxy.simulator.engine_io import SimRequest
from kvproxy.simulator.kv_event import BlockStored, ExtraKeys


class Sequence:
    """Progress of one request. `computed` tokens have their KV in `blocks`; `target` must be reached before the next
    token comes out of a prefill. While decoding, the newest token's KV is not computed yet."""

    __slots__ = (
        "admitted_at",
        "blocks",
        "cached_tokens",
        "computed",
        "generated",
        "gone",
        "hashed",
        "request",
        "submitted_at",
        "target",
    )

    def __init__(self, request: SimRequest, submitted_at: float) -> None:
        self.request = request
        self.submitted_at = submitted_at
        self.admitted_at: float | None = None
        self.cached_tokens = 0
        self.generated = 0
        self.gone = False
        self.restart()

    def restart(self) -> None:
        """Back to the waiting line with nothing computed; what was generated is computed again with the prompt."""
        self.blocks: list[int] = []
        self.hashed = 0
        self.computed = 0
        self.target = self.request.prompt_tokens + self.generated

    @property
    def remaining(self) -> int:
        """Tokens still to generate."""
        return self.request.output_tokens - self.generated

    def stored_event(self, first: int, last: int, block_size: int, *, parent: int | None) -> BlockStored:
        """The event for blocks `first` up to, not including, `last`."""
        request = self.request
        return BlockStored(
            block_hashes=tuple(request.block_hashes[first:last]),
            parent=parent,
            token_ids=tuple(request.token_ids[first * block_size : last * block_size]),
            lora_id=request.lora_id,
            lora_name=request.lora_name,
            extra_keys=tuple(self._extra_keys(block) for block in range(first, last)) if request.token_ids else (),
        )

    def _extra_keys(self, block: int) -> ExtraKeys | None:
        request = self.request
        lora = (request.lora_name,) if request.lora_name is not None else ()
        salt = (request.cache_salt,) if request.cache_salt is not None and block == 0 else ()
        return (*lora, *salt) or None
