"""Continuous batching as vLLM schedules it: which sequence computes how many tokens in the next engine step."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from kvproxy.simulator.block_cache import BlockCache
from kvproxy.simulator.engine_io import EngineCounters, EngineSettings, SimRequest
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


@dataclass(slots=True)
class Batch:
    """One step: prompt chunks in tokens, and how many decoding sequences (all of them) take part."""

    chunks: list[tuple[Sequence, int]] = field(default_factory=list)
    decodes: int = 0
    preempted: list[Sequence] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.chunks) or self.decodes > 0


class Scheduler:
    """Holds the sequences and their blocks. Running ones come first and decodes before chunks; a waiting one is
    admitted in order of arrival when its whole prompt fits; when memory runs out the newest runner starts over."""

    def __init__(self, settings: EngineSettings, cache: BlockCache) -> None:
        self._settings = settings
        self.cache = cache
        self.counters = EngineCounters()
        self.waiting: OrderedDict[str, Sequence] = OrderedDict()
        self.running: dict[str, Sequence] = {}
        self.decoding: dict[str, Sequence] = {}
        self.prefilling: dict[str, Sequence] = {}

    def fits(self, tokens: int) -> bool:
        """Whether a sequence of this length can ever run."""
        return self._blocks_for(tokens) <= self._settings.capacity_blocks

    def plan(self, now: float) -> Batch:
        """Reserves the memory of the next step and says what it computes; an empty batch when there is nothing."""
        batch = Batch()
        self._make_room_to_decode(batch)
        budget = self._settings.max_batched_tokens - len(self.decoding)
        for sequence in list(self.prefilling.values()):
            budget -= self._continue_prefill(sequence, budget, batch)
        if not batch.preempted:
            self._admit(now, budget, batch)
        batch.decodes = len(self.decoding)
        return batch

    def limit_decode_steps(self, wanted: int) -> int:
        """The most steps, up to `wanted`, that every decoding sequence can take in the free blocks."""
        steps, block_size = wanted, self._settings.block_size
        while steps > 1 and len(self.decoding) * (steps // block_size + 1) > self.cache.free_blocks:
            if self._blocks_to_decode(steps) <= self.cache.free_blocks:
                break
            steps //= 2
        return steps

    def count_resident_tokens(self) -> int:
        """Tokens of which the decoding sequences hold the KV."""
        return sum(sequence.computed for sequence in self.decoding.values())

    def decode(self, sequence: Sequence, steps: int) -> None:
        """Takes `steps` decode steps of one sequence; the caller made sure of the blocks."""
        sequence.generated += steps
        self._grow(sequence, sequence.computed + steps)
        sequence.computed += steps

    def finish_chunk(self, sequence: Sequence, tokens: int) -> bool:
        """Books a computed prompt chunk; True when the prompt is complete, so that a token is out."""
        sequence.computed += tokens
        if sequence.computed < sequence.target:
            return False
        sequence.generated += 1
        del self.prefilling[sequence.request.id]
        self.decoding[sequence.request.id] = sequence
        return True

    def drop(self, sequence: Sequence) -> None:
        """Takes a sequence out wherever it is; its blocks are free at once."""
        sequence.gone = True
        for place in (self.waiting, self.running, self.decoding, self.prefilling):
            place.pop(sequence.request.id, None)
        self.cache.release(sequence.blocks)
        sequence.blocks = []

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._settings.block_size)

    def _blocks_to_decode(self, steps: int) -> int:
        return sum(
            max(0, self._blocks_for(sequence.computed + steps) - len(sequence.blocks))
            for sequence in self.decoding.values()
        )

    def _make_room_to_decode(self, batch: Batch) -> None:
        while self._blocks_to_decode(1) > self.cache.free_blocks:
            self._preempt(next(reversed(self.running.values())), batch)

    def _preempt(self, sequence: Sequence, batch: Batch) -> None:
        request_id = sequence.request.id
        self.cache.release(sequence.blocks)
        for place in (self.running, self.decoding, self.prefilling):
            place.pop(request_id, None)
        sequence.restart()
        self.waiting[request_id] = sequence
        self.waiting.move_to_end(request_id, last=False)
        self.counters.preemptions += 1
        batch.preempted.append(sequence)

    def _continue_prefill(self, sequence: Sequence, budget: int, batch: Batch) -> int:
        """Tokens scheduled. A half-computed prompt is always the newest runner: without room it starts over."""
        chunk = min(budget, sequence.target - sequence.computed)
        spare = self.cache.free_blocks - self._blocks_to_decode(1)
        if self._blocks_for(sequence.computed + chunk) - len(sequence.blocks) > spare:
            self._preempt(sequence, batch)
            return 0
        return self._schedule_chunk(sequence, chunk, batch)

    def _schedule_chunk(self, sequence: Sequence, chunk: int, batch: Batch) -> int:
        self._grow(sequence, sequence.computed + chunk)
        batch.chunks.append((sequence, chunk))
        return chunk

    def _admit(self, now: float, budget: int, batch: Batch) -> None:
        while self.waiting and budget > 0 and len(self.running) < self._settings.max_sequences:
            sequence = next(iter(self.waiting.values()))
            hashes = sequence.request.block_hashes
            limit = (sequence.target - 1) // self._settings.block_size if self._settings.prefix_caching else 0
            hits = self.cache.match_prefix(hashes, limit)
            wanted = self._blocks_for(sequence.target) - hits + self.cache.count_idle(hashes, hits)
            if wanted > self.cache.free_blocks - self._blocks_to_decode(1):
                return
            self._start(sequence, hits, now)
            chunk = min(budget, sequence.target - sequence.computed)
            budget -= self._schedule_chunk(sequence, chunk, batch)

    def _start(self, sequence: Sequence, hits: int, now: float) -> None:
        request, block_size = sequence.request, self._settings.block_size
        del self.waiting[request.id]
        sequence.blocks = self.cache.acquire(request.block_hashes, hits)
        sequence.hashed = hits
        sequence.computed = hits * block_size
        if sequence.admitted_at is None:
            sequence.admitted_at = now
            sequence.cached_tokens = sequence.computed
            self.counters.prompt_tokens += request.prompt_tokens
            self.counters.prefix_cache_queries += request.prompt_tokens if self._settings.prefix_caching else 0
            self.counters.prefix_cache_hits += sequence.computed
        if request.report_full and hits:
            self.cache.announce(sequence.stored_event(0, hits, block_size, parent=None))
        self.running[request.id] = sequence
        self.prefilling[request.id] = sequence

    def _grow(self, sequence: Sequence, tokens: int) -> None:
        """Gives the sequence blocks for `tokens` and makes those that become full reusable."""
        missing = self._blocks_for(tokens) - len(sequence.blocks)
        if missing > 0:
            sequence.blocks += self.cache.allocate(missing)
        first, hashes = sequence.hashed, sequence.request.block_hashes
        last = min(tokens // self._settings.block_size, len(hashes))
        if last > first and self._settings.prefix_caching:
            parent = hashes[first - 1] if first else None
            event = sequence.stored_event(first, last, self._settings.block_size, parent=parent)
            self.cache.store(sequence.blocks[first:last], event)
            sequence.hashed = last
