"""KV events: changes of the blocks that an engine holds, as the indexes take them."""

from __future__ import annotations

from dataclasses import dataclass

from kvproxy.cache.clients.tokens import TokenIds

#: How the engine names a block: the low 64 bits of its hash, or the whole digest. Only comparable within one stream.
EngineHash = int | bytes

#: Inputs of one block's hash besides its tokens (cache salt, LoRA name, media), hashable; None: none.
BlockExtra = tuple[object, ...] | None

#: Kinds of KV cache whose blocks make a prefix (a version that names none has no others).
WHOLE_PREFIX = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})

#: An id that names a picture, in the place of its tokens, has this bit, as no token of a vocabulary has.
FOLDED = 1 << 31


@dataclass(frozen=True, slots=True)
class BlockStored:
    """A run of consecutive blocks became reusable. Idempotent: engines re-publish blocks they already hold."""

    block_hashes: tuple[EngineHash, ...]
    parent: EngineHash | None  # block before the first one; None at the start, or unknown chain in a re-report
    token_ids: TokenIds  # none: copies, by vLLM's offloading, of blocks whose tokens were reported before
    block_tokens: int
    lora_name: str | None = None
    lora_id: int | None = None  # the only LoRA field before 0.16
    medium: str = "GPU"  # vLLM: GPU (CPU builds too), CPU, STORAGE; SGLang: GPU, CPU_PINNED, DISK, EXTERNAL
    extra: tuple[BlockExtra, ...] | None = None  # one a block; None: no block has any
    group: int | None = None  # KV cache group of a hybrid model
    spec_kind: str | None = None
    window: int | None = None  # tokens, of a group of sliding windows
    pairs: bool = False  # the engine's keys are pairs of tokens: a block counts for it with the token after it alone
    wide: bool = False  # some ids name a picture, and are folded

    @property
    def uniform(self) -> bool:
        """True if every block has its own `block_tokens` tokens here (not so in some Mamba and windowed groups)."""
        return len(self.token_ids) == len(self.block_hashes) * self.block_tokens > 0

    @property
    def indexable(self) -> bool:
        """True if a prefix index may use it: full attention (or a version without other kinds), tokens complete."""
        return self.spec_kind in WHOLE_PREFIX and self.uniform

    @property
    def blocks(self) -> int:
        return len(self.block_hashes)


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Blocks left one medium; copies on others stay."""

    block_hashes: tuple[EngineHash, ...]
    medium: str = "GPU"
    group: int | None = None

    @property
    def blocks(self) -> int:
        return len(self.block_hashes)


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The whole prefix cache of this rank was dropped."""

    @property
    def blocks(self) -> int:
        return 0


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared
