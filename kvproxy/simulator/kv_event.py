"""What happens to blocks of a simulated cache, in the order in which it happens."""

from __future__ import annotations

from dataclasses import dataclass

#: Extra keys of one block, as an event shows them: the cache salt (first block only), the LoRA name (every block).
ExtraKeys = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BlockStored:
    """A run of consecutive blocks became reusable; `parent` is the hash before the first one (None at the start).

    Of another `group` than that of full attention, `kind` says which, only those with hashes did: the tokens are those
    of all blocks of the run."""

    block_hashes: tuple[int, ...]
    parent: int | None
    token_ids: tuple[int, ...] = ()
    lora_id: int | None = None
    lora_name: str | None = None
    extra_keys: tuple[ExtraKeys | None, ...] = ()
    group: int = 0
    kind: str = "full_attention"


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """One block left the cache."""

    block_hash: int
    group: int = 0


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The whole prefix cache was dropped."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared
