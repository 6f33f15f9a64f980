"""A simulated vLLM with a hybrid model: what it reuses ends where it kept a state."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, fields, replace

from kvproxy.lab.simulator.block_cache import BlockCache
from kvproxy.lab.simulator.engine import Engine
from kvproxy.lab.simulator.engine_io import BlockRemoved, BlockStored, EngineSettings
from kvproxy.lab.simulator.scheduler import Scheduler, SequenceMemory
from kvproxy.lab.simulator.sequence import Sequence as Running
from kvproxy.lab.simulator.vllm_server import VllmApp
from kvproxy.lab.simulator.vllm_settings import VllmSettings

#: The KV cache group of these layers, as events number and name it; 0 is that of full attention.
GROUP = 1
KIND = "mamba"


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """States stand at multiples of `interval_tokens`: at all of them, or with `ends_only` (vLLM's default) at the last
    one of each prompt, and where a prompt was seen to part from what is held."""

    interval_tokens: int
    ends_only: bool = False

    def count_reusable(self, block_hashes: Sequence[int], held: int, block_size: int, states: Container[int]) -> int:
        """Of `held` leading blocks, those up to the last one at whose end there is a state."""
        step = self.interval_tokens // block_size
        for end in range(held - held % step, 0, -step):
            if block_hashes[end - 1] in states:
                return end
        return 0

    def find_ends(self, first: int, last: int, *, prompt_tokens: int, parted: int, block_size: int) -> list[int]:
        """Numbers of blocks, over `first` and up to `last`, after which a state is kept. `parted` of them were held
        before, without a state."""
        step = self.interval_tokens // block_size
        if self.ends_only:
            places = {(prompt_tokens - 1) // self.interval_tokens * step, parted - parted % step}
            return sorted(end for end in places if first < end <= last)
        return list(range(first - first % step + step, last + 1, step))


class HybridCache(BlockCache):
    """Keeps states at the ends of blocks, as long as the blocks are there."""

    def __init__(self, settings: EngineSettings, checkpoints: Checkpoints) -> None:
        super().__init__(settings.capacity_blocks, record_events=settings.kv_events)
        self._block_size = settings.block_size
        self._checkpoints = checkpoints
        self._states: set[int] = set()

    def match_prefix(self, block_hashes: Sequence[int], limit: int) -> int:
        """Up to a state."""
        held = self.match_held(block_hashes, limit)
        return self._checkpoints.count_reusable(block_hashes, held, self._block_size, self._states)

    def match_held(self, block_hashes: Sequence[int], limit: int) -> int:
        """Return the number of leading blocks that are held, reusable or not."""
        return super().match_prefix(block_hashes, limit)

    def keep_states(self, event: BlockStored) -> None:
        """Keep a state at the end of each of these blocks, and announce it."""
        self._states.update(event.block_hashes)
        self.announce(event)

    def clear(self) -> bool:
        cleared = super().clear()
        if cleared:
            self._states.clear()
        return cleared

    def _forget(self, block: int, block_hash: int) -> None:
        if block_hash not in self._copies and block_hash in self._states:
            self._states.remove(block_hash)
            self.announce(BlockRemoved(block_hash, GROUP))
        super()._forget(block, block_hash)


class HybridMemory(SequenceMemory):
    """Keeps states of what is computed."""

    cache: HybridCache

    def __init__(self, settings: EngineSettings, cache: HybridCache, checkpoints: Checkpoints) -> None:
        super().__init__(settings, cache)
        self._checkpoints = checkpoints
        self._parted: dict[str, int] = {}  # blocks that were held when a request was admitted

    def begin(self, sequence: Running, hits: int, read: int) -> None:
        """Note first how many of its blocks are held."""
        limit = (sequence.target - 1) // self._settings.block_size
        self._parted[sequence.request.id] = self.cache.match_held(sequence.request.block_hashes, limit)
        super().begin(sequence, hits, read)

    def grow(self, sequence: Running, tokens: int) -> None:
        """Keep the states of blocks that become full."""
        first = sequence.hashed
        super().grow(sequence, tokens)
        if sequence.hashed > first:
            self._keep_states(sequence, first, sequence.hashed)

    def _keep_states(self, sequence: Running, first: int, last: int) -> None:
        request = sequence.request
        size = self._settings.block_size
        parted = self._parted[request.id]
        ends = self._checkpoints.find_ends(
            first, last, prompt_tokens=request.prompt_tokens, parted=parted, block_size=size
        )
        if ends:
            parent = request.block_hashes[first - 1] if first else None
            event = sequence.stored_event(first, last, size, parent=parent)
            hashes = tuple(request.block_hashes[end - 1] for end in ends)
            keys = tuple(event.extra_keys[end - 1 - first] for end in ends) if event.extra_keys else ()
            self.cache.keep_states(replace(event, block_hashes=hashes, extra_keys=keys, group=GROUP, kind=KIND))


class HybridEngine(Engine):
    """An engine with such a cache; it has no tiers below."""

    def __init__(self, settings: EngineSettings, checkpoints: Checkpoints) -> None:
        if checkpoints.interval_tokens % settings.block_size:
            raise ValueError("states are kept at the ends of blocks")
        super().__init__(settings)
        self.own_cache = HybridCache(settings, checkpoints)
        self.scheduler = Scheduler(settings, HybridMemory(settings, self.own_cache, checkpoints))


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridSettings(VllmSettings):
    """`checkpoints` of its engine."""

    checkpoints: Checkpoints


def make_hybrid(settings: VllmSettings, checkpoints: Checkpoints) -> HybridSettings:
    """Return the settings with a hybrid model."""
    same = {one.name: getattr(settings, one.name) for one in fields(settings)}
    return HybridSettings(**same, checkpoints=checkpoints)


class HybridVllm(VllmApp):
    """Serve it while it is entered."""

    def make_engine(self, settings: VllmSettings) -> Engine:
        """Return the engine behind the server."""
        assert isinstance(settings, HybridSettings)
        return HybridEngine(settings.engine, settings.checkpoints)
