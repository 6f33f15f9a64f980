"""KV events as the rest of kvproxy sees them, whatever version published them, and slices of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from kvproxy.clients.tokens import TokenIds

#: How the engine names a block: the low 64 bits of its hash, or the whole digest. Only comparable within one stream.
EngineHash = int | bytes

#: What besides its tokens shapes one block (cache salt, LoRA name, media), hashable; None: nothing.
BlockExtra = tuple[object, ...] | None

#: Kinds of KV cache whose blocks make a prefix (a version that names none knows nothing else).
WHOLE_PREFIX = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})


@dataclass(frozen=True, slots=True)
class BlockStored:
    """A run of consecutive blocks became reusable. Idempotent: engines re-publish blocks they already hold."""

    block_hashes: tuple[EngineHash, ...]
    parent: EngineHash | None  # block before the first one; None at the start, or unknown chain in a re-report
    token_ids: TokenIds
    block_tokens: int
    lora_name: str | None = None
    lora_id: int | None = None  # all that versions before 0.16 say about a LoRA
    medium: str = "GPU"  # vLLM: GPU (CPU builds too), CPU, STORAGE; SGLang: GPU, CPU_PINNED, DISK, EXTERNAL
    extra: tuple[BlockExtra, ...] | None = None  # one a block; None: no block has any
    group: int | None = None  # KV cache group of a hybrid model
    spec_kind: str | None = None
    window: int | None = None  # tokens, of a group of sliding windows
    pairs: bool = False  # the engine's keys are pairs of tokens: a block counts for it with the token after it alone

    @property
    def uniform(self) -> bool:
        """Whether every block has its own `block_tokens` tokens here (not so in some Mamba and windowed groups)."""
        return len(self.token_ids) == len(self.block_hashes) * self.block_tokens > 0

    @property
    def indexable(self) -> bool:
        """Whether a prefix index may use it: full attention (or a version that knows nothing else), tokens complete."""
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


@dataclass(frozen=True, slots=True)
class Effort:
    """Work that led to no event yet, in blocks whose handling costs about as much: an event that is skipped, or a long
    one that is decoded step by step."""

    blocks: int = 1


@dataclass(slots=True)
class Skipped:
    """Events that could not be used, by reason; `unknown_type` is harmless, `malformed` may leave the index wrong."""

    counts: dict[str, int] = field(default_factory=lambda: {"unknown_type": 0, "malformed": 0})


def sliced(events: Iterable[KvEvent | Effort], max_blocks: int) -> Iterator[tuple[list[KvEvent], int]]:
    """`events` in order, in lists of at most `max_blocks` blocks, each with what it cost; a longer event is cut where
    that changes nothing. Effort fills a list as blocks do, so that a list may be empty.
    """
    batch: list[KvEvent] = []
    spent = 0
    for event in events:
        if isinstance(event, Effort):
            spent += event.blocks
            if spent >= max_blocks:
                yield batch, spent
                batch, spent = [], 0
            continue
        for piece in _pieces(event, max_blocks):
            cost = max(1, piece.blocks)
            if batch and spent + cost > max_blocks:
                yield batch, spent
                batch, spent = [], 0
            batch.append(piece)
            spent += cost
    if batch or spent:
        yield batch, spent


def _pieces(event: KvEvent, size: int) -> Iterator[KvEvent]:
    if event.blocks <= size:
        yield event
    elif isinstance(event, BlockRemoved):
        for start in range(0, event.blocks, size):
            yield replace(event, block_hashes=event.block_hashes[start : start + size])
    elif isinstance(event, BlockStored) and event.uniform:
        for start in range(0, event.blocks, size):
            yield _stored_piece(event, start, start + size)
    else:
        yield event


def _stored_piece(event: BlockStored, start: int, end: int) -> BlockStored:
    """Blocks start..end; the parent of a later piece is the block before it."""
    return replace(
        event,
        block_hashes=event.block_hashes[start:end],
        parent=event.block_hashes[start - 1] if start else event.parent,
        token_ids=event.token_ids[start * event.block_tokens : end * event.block_tokens],
        extra=None if event.extra is None else event.extra[start:end],
    )
