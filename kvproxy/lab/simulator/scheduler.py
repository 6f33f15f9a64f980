"""Continuous batching as vLLM schedules it: which sequence computes how many tokens in the next engine step."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from kvproxy.lab.simulator.block_cache import PrefixCache
from kvproxy.lab.simulator.engine_io import EngineCounters, EngineSettings, Scheduling
from kvproxy.lab.simulator.lower_tiers import LowerTiers
from kvproxy.lab.simulator.sequence import LoraSlots, Sequence, WaitingLine


@dataclass(slots=True)
class Batch:
    """One step: prompt chunks in tokens, and how many decoding sequences (all of them) take part."""

    chunks: list[tuple[Sequence, int]] = field(default_factory=list)
    chunk_tokens: int = 0  # of all chunks
    reserved_blocks: int = 0  # that the decoding sequences need in this step
    decodes: int = 0
    loads: int = 0  # adapters that have to be loaded first
    reads_s: float = 0.0  # until blocks from lower tiers arrive
    preempted: list[Sequence] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.chunks) or self.decodes > 0


class SequenceMemory:
    """The blocks of an engine's sequences: in its cache, and as its lower tiers give them."""

    def __init__(self, settings: EngineSettings, cache: PrefixCache, *, lower: LowerTiers | None = None) -> None:
        self._settings = settings
        self.cache = cache
        self.lower = lower or LowerTiers(())

    def count_blocks(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self._settings.block_size)

    def count_missing(self, sequences: Iterable[Sequence], steps: int) -> int:
        """Blocks that the sequences lack for so many decode steps."""
        size = self._settings.block_size
        blocks = 0
        for one in sequences:
            missing = -(-(one.computed + steps) // size) - len(one.blocks)
            if missing > 0:
                blocks += missing
        return blocks

    def limit_steps(self, decoding: Collection[Sequence], wanted: int) -> int:
        """Return the most steps, up to `wanted`, that every decoding sequence can take in the free blocks."""
        steps = wanted
        block_size = self._settings.block_size
        while steps > 1 and len(decoding) * (steps // block_size + 1) > self.cache.free_blocks:
            if self.count_missing(decoding, steps) <= self.cache.free_blocks:
                break
            steps //= 2
        return steps

    def begin(self, sequence: Sequence, hits: int, read: int) -> None:
        """Give an admitted sequence the blocks of its prompt that are here, and those that were `read`."""
        size = self._settings.block_size
        sequence.blocks = self.cache.acquire(sequence.request.block_hashes, hits)
        sequence.hashed = hits
        if read:
            self.grow(sequence, (hits + read) * size)
        sequence.computed = (hits + read) * size

    def grow(self, sequence: Sequence, tokens: int) -> None:
        """Give the sequence blocks for `tokens` and make those that become full reusable."""
        size = self._settings.block_size
        missing = -(-tokens // size) - len(sequence.blocks)
        if missing > 0:
            sequence.blocks += self.cache.allocate(missing)
        first = sequence.hashed
        hashes = sequence.request.block_hashes
        last = min(tokens // size, len(hashes))
        if last > first and self._settings.prefix_caching:
            parent = hashes[first - 1] if first else None
            lookahead = self._settings.lookahead_tokens
            event = sequence.stored_event(first, last, size, parent=parent, lookahead_tokens=lookahead)
            self.cache.store(sequence.blocks[first:last], event)
            sequence.hashed = last


class Scheduler:
    """Holds the sequences and their blocks. Running ones come first and decodes before chunks; the first of those that
    wait is admitted when a slot, tokens of the step and memory for its whole prompt are left. When memory runs out, a
    runner starts over: the newest, or under priority scheduling the least urgent."""

    def __init__(self, settings: EngineSettings, memory: SequenceMemory) -> None:
        self._settings = settings
        self.memory = memory
        self.cache = memory.cache
        self.loras = LoraSlots(settings.max_loras)
        self.counters = EngineCounters()
        self.waiting = WaitingLine(settings.scheduling)
        self.running: dict[str, Sequence] = {}
        self.decoding: dict[str, Sequence] = {}
        self.prefilling: dict[str, Sequence] = {}

    def plan(self, now: float) -> Batch:
        """Reserve the memory of the next step and return its work; an empty batch when there is nothing."""
        batch = Batch(reserved_blocks=self.memory.count_missing(self.decoding.values(), 1))
        while batch.reserved_blocks > self.cache.free_blocks:
            self._preempt(self._victim(), batch)
        for sequence in list(self.prefilling.values()):
            self._continue_prefill(sequence, batch)
        if not batch.preempted:
            self._admit(now, batch)
        batch.decodes = len(self.decoding)
        self.loras.note_step(self._adapters(), (one.request.lora_name for one in self.waiting), now)
        return batch

    def decode(self, sequence: Sequence, steps: int) -> None:
        """Take `steps` decode steps of one sequence; the caller made sure of the blocks."""
        sequence.generated += steps
        self.memory.grow(sequence, sequence.computed + steps)
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
        """Take a sequence out wherever it is; its blocks are free at once."""
        sequence.gone = True
        self.waiting.remove(sequence)
        self._stop(sequence)
        sequence.blocks = []

    def _victim(self) -> Sequence:
        """Return the runner that vLLM gives up for another's memory."""
        if self._settings.scheduling is Scheduling.PRIORITY:
            return max(self.running.values(), key=lambda sequence: sequence.urgency)
        return next(reversed(self.running.values()))

    def _preempt(self, sequence: Sequence, batch: Batch) -> None:
        self._stop(sequence)
        sequence.restart()
        self.waiting.put_back(sequence)
        self.counters.preemptions += 1
        batch.preempted.append(sequence)
        batch.chunks = [chunk for chunk in batch.chunks if chunk[0] is not sequence]
        batch.chunk_tokens = sum(tokens for _, tokens in batch.chunks)
        batch.reserved_blocks = self.memory.count_missing(self.decoding.values(), 1)

    def _stop(self, sequence: Sequence) -> None:
        self.cache.release(sequence.blocks)
        for place in (self.running, self.decoding, self.prefilling):
            place.pop(sequence.request.id, None)

    def _tokens_left(self, batch: Batch) -> int:
        return self._settings.max_batched_tokens - len(self.decoding) - batch.chunk_tokens

    def _next_chunk(self, sequence: Sequence, batch: Batch) -> int:
        """Prompt tokens it computes in this step; where there are others, a threshold bounds long prompts."""
        chunk = min(self._tokens_left(batch), sequence.target - sequence.computed)
        threshold = self._settings.long_prefill_token_threshold
        return min(chunk, threshold) if threshold and len(self.running) + len(self.waiting) > 1 else chunk

    def _continue_prefill(self, sequence: Sequence, batch: Batch) -> None:
        """Schedules the next chunk; without room for it runners start over, itself among them."""
        while sequence.request.id in self.prefilling and self._tokens_left(batch) > 0:
            chunk = self._next_chunk(sequence, batch)
            missing = self.memory.count_blocks(sequence.computed + chunk) - len(sequence.blocks)
            if missing <= self.cache.free_blocks - batch.reserved_blocks:
                self._schedule_chunk(sequence, chunk, batch)
                return
            self._preempt(self._victim(), batch)

    def _schedule_chunk(self, sequence: Sequence, chunk: int, batch: Batch) -> None:
        self.memory.grow(sequence, sequence.computed + chunk)
        batch.chunks.append((sequence, chunk))
        batch.chunk_tokens += chunk

    def _admit(self, now: float, batch: Batch) -> None:
        while self.waiting and len(self.running) < self._settings.max_sequences and self._tokens_left(batch) > 0:
            sequence = self.waiting.first()
            if not self.loras.admits(sequence.request.lora_name, self._adapters()):
                return
            hashes = sequence.request.block_hashes
            limit = (sequence.target - 1) // self._settings.block_size if self._settings.prefix_caching else 0
            hits = self.cache.match_prefix(hashes, limit)
            wanted = self.memory.count_blocks(sequence.target) - hits + self.cache.count_idle(hashes, hits)
            if wanted > self.cache.free_blocks - batch.reserved_blocks:
                return
            batch.loads += self.loras.take_slot(sequence.request.lora_name, self._adapters())
            reads = self.memory.lower.read(hashes, hits, min(limit, len(hashes)))
            batch.reads_s += reads.seconds
            self._start(sequence, hits, reads.blocks, now)
            self._schedule_chunk(sequence, self._next_chunk(sequence, batch), batch)

    def _adapters(self) -> Iterator[str | None]:
        """Of what runs."""
        return (one.request.lora_name for one in self.running.values())

    def _start(self, sequence: Sequence, hits: int, read: int, now: float) -> None:
        request = sequence.request
        block_size = self._settings.block_size
        self.waiting.remove(sequence)
        self.memory.begin(sequence, hits, read)
        self.counters.external_prefix_cache_hits += read * block_size
        if sequence.admitted_at is None:
            sequence.admitted_at = now
            sequence.cached_tokens = sequence.computed
            self.counters.prompt_tokens += request.prompt_tokens
            self.counters.prefix_cache_queries += request.prompt_tokens if self._settings.prefix_caching else 0
            pulled = min(request.pulled_tokens, hits * block_size)
            self.counters.prefix_cache_hits += hits * block_size - pulled
            self.counters.external_prefix_cache_hits += pulled
        self.running[request.id] = sequence
        self.prefilling[request.id] = sequence
