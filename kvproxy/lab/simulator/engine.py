"""A continuous-batching inference engine. Time is an argument: no clock, no I/O, no randomness inside.

Prefill chunks and decodes share each step, as in vLLM. A stretch in which nothing but decoding happens is one
calculation up to the next arrival, finish or change of speed, so that virtual time costs microseconds a request.
"""

from __future__ import annotations

from collections.abc import Sequence as Hashes

from kvproxy.lab.simulator.block_cache import BlockCache, PrefixCache
from kvproxy.lab.simulator.engine_io import (
    CacheChanged,
    EngineLoad,
    EngineOutput,
    EngineSettings,
    Finished,
    FirstToken,
    Preempted,
    Rejected,
    SimRequest,
    Tokens,
)
from kvproxy.lab.simulator.lower_tiers import LowerTier, LowerTiers
from kvproxy.lab.simulator.retention import Future, make_ranking
from kvproxy.lab.simulator.scheduler import Batch, Scheduler, SequenceMemory
from kvproxy.lab.simulator.sequence import Sequence
from kvproxy.lab.simulator.timing import Stretch


class Engine:
    """Call `advance(now)` when `next_event_at()` has come (or earlier, or later), and read the outputs in order.

    `now` is seconds and never goes back. `submit` and `cancel` act at `now`; a request that arrives during a step
    joins at the step's end. Several engines may be given one `cache`: a pool no real fleet has, but a bound for it.
    They may also share a `store`, below their own tiers, and the `future`, where eviction goes by that.
    """

    def __init__(
        self,
        settings: EngineSettings,
        *,
        cache: PrefixCache | None = None,
        store: LowerTier | None = None,
        future: Future | None = None,
    ) -> None:
        self.settings = settings
        self._future = future
        own_tiers = [LowerTier(each, future=future) for each in settings.tiers]
        tiers = [*own_tiers, *(() if store is None else (store,))]
        lower = LowerTiers(tiers) if tiers else None
        ranking = make_ranking(settings.eviction, settings.capacity_blocks, future=future)
        own = BlockCache(settings.capacity_blocks, record_events=settings.kv_events, lower=lower, ranking=ranking)
        self.own_cache = own  # not the one that it was given
        self.scheduler = Scheduler(settings, SequenceMemory(settings, own if cache is None else cache, lower=lower))
        self._sequences: dict[str, Sequence] = {}
        self._batch: Batch | None = None
        self._stretch = Stretch(0.0, 0.0)
        self._outputs: list[EngineOutput] = []
        self._paused: dict[str, float] = {}  # preempted in the middle of an answer: when

    @property
    def load(self) -> EngineLoad:
        """How busy it is right now."""
        scheduler = self.scheduler
        return EngineLoad(len(scheduler.running), len(scheduler.waiting), scheduler.cache.usage)

    def submit(self, request: SimRequest, now: float) -> None:
        """Queues a request; an id in use is a ValueError."""
        if request.id in self._sequences:
            raise ValueError(f"request {request.id!r} is already here")
        self._run_to(now)
        blocks = self.scheduler.memory.count_blocks(request.prompt_tokens + request.output_tokens - 1)
        if blocks > self.settings.capacity_blocks:
            self._outputs.append(Rejected(request.id, now))
            return
        sequence = Sequence(request, now)
        self._sequences[request.id] = sequence
        self.scheduler.waiting.add(sequence)
        self._join(now)

    def cancel(self, request_id: str, now: float) -> bool:
        """Drop a request and frees its blocks at once; False when it is not here (any more)."""
        self._run_to(now)
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return False
        self._paused.pop(request_id, None)
        self.scheduler.drop(sequence)
        self._join(now)
        return True

    def wake(self, now: float) -> bool:
        """Plan again if requests wait and nothing runs, since another engine may have freed blocks of a shared cache.
        Returns True if a step begins."""
        if self._batch is None and self.scheduler.waiting:
            self._begin(now)
            return self._batch is not None
        return False

    def receive(self, block_hashes: Hashes[int], now: float) -> int:
        """Take in copies of a prompt's leading blocks, as far as they are not here: how many. Announced with the next
        step."""
        self._run_to(now)
        return self.own_cache.receive(block_hashes)

    def next_event_at(self) -> float | None:
        """When `advance` has something to do; None when idle."""
        if self._outputs:
            return self._outputs[0].at
        return self._stretch.ends_at if self._batch is not None else None

    def advance(self, now: float) -> list[EngineOutput]:
        """Return the outputs up to and including `now`, in order."""
        self._run_to(now)
        outputs = self._outputs
        self._outputs = []
        return outputs

    def _run_to(self, now: float) -> None:
        while self._batch is not None and self._stretch.ends_at <= now:
            at = self._stretch.ends_at
            self._complete(self._batch, at)
            self._begin(at)

    def _join(self, now: float) -> None:
        if self._batch is None:
            self._begin(now)
        else:
            self._stretch.cut(now)

    def _begin(self, now: float) -> None:
        batch = self.scheduler.plan(now)
        for sequence in batch.preempted:
            self._outputs.append(Preempted(sequence.request.id, now))
            if sequence.generated:
                self._paused.setdefault(sequence.request.id, now)
        self._batch = batch if batch else None
        if batch:
            self._stretch = _time_step(batch, self.scheduler, self.settings, now)

    def _complete(self, batch: Batch, at: float) -> None:
        scheduler = self.scheduler
        before = len(self._outputs)
        scheduler.counters.steps += self._stretch.steps
        if batch.decodes:
            self._complete_decodes(at)
        for sequence, tokens in batch.chunks:
            if not sequence.gone and scheduler.finish_chunk(sequence, tokens):
                self._emit_token(sequence, at)
        events = scheduler.cache.take_events()
        if events:
            self._outputs.insert(before, CacheChanged(at, tuple(events)))

    def _complete_decodes(self, at: float) -> None:
        scheduler = self.scheduler
        stretch = self._stretch
        steps = stretch.steps
        tokens = stretch.steps * len(scheduler.decoding)
        scheduler.counters.generation_tokens += tokens
        if tokens:
            scheduler.counters.token_gaps.add((at - stretch.started_at) / steps, tokens)
        finished = []
        for sequence in scheduler.decoding.values():
            scheduler.decode(sequence, steps)
            if self.settings.token_outputs:
                self._outputs.append(Tokens(sequence.request.id, at, sequence.generated))
            if sequence.remaining <= 0:
                finished.append(sequence)
        for sequence in finished:
            self._finish(sequence, at)

    def _emit_token(self, sequence: Sequence, at: float) -> None:
        request_id = sequence.request.id
        counters = self.scheduler.counters
        counters.generation_tokens += 1
        if sequence.generated == 1:
            admitted_at = sequence.submitted_at if sequence.admitted_at is None else sequence.admitted_at
            self._outputs.append(FirstToken(request_id, at, sequence.cached_tokens, sequence.submitted_at, admitted_at))
        elif (paused_at := self._paused.pop(request_id, None)) is not None:
            counters.token_gaps.add(at - paused_at)
        if self.settings.token_outputs:
            self._outputs.append(Tokens(request_id, at, sequence.generated))
        if sequence.remaining <= 0:
            self._finish(sequence, at)

    def _finish(self, sequence: Sequence, at: float) -> None:
        request = sequence.request
        del self._sequences[request.id]
        if self._future is not None:
            self._future.note_prompt(request.block_hashes)
        self.scheduler.drop(sequence)
        self._outputs.append(Finished(request.id, at, sequence.generated, request.finish_reason))


def _time_step(batch: Batch, scheduler: Scheduler, settings: EngineSettings, now: float) -> Stretch:
    """Return the time that a batch takes: one step, or as many as it stays the same for."""
    timing = settings.timing
    decoding = scheduler.decoding.values()
    factor = timing.factor_at(now)
    step_s = 0.0
    if batch.decodes:
        step_s = timing.decode_s(batch.decodes, sum([sequence.computed for sequence in decoding]))
    if batch.chunks:
        step_s += timing.prefill_step_s + batch.loads * settings.lora_load_s + batch.reads_s
        step_s += sum(timing.prefill_s(tokens, sequence.computed) for sequence, tokens in batch.chunks)
        step_s = step_s if batch.decodes else max(step_s, timing.prefill_floor_s)
        return Stretch(now, step_s * factor)
    if settings.token_outputs or batch.preempted:  # admission pauses for one step after a preemption
        return Stretch(now, step_s * factor)
    steps = scheduler.memory.limit_steps(decoding, min([sequence.remaining for sequence in decoding]))
    stretch = Stretch(now, step_s * factor, timing.decode_growth_s(batch.decodes) * factor, steps)
    stretch.cut(timing.next_change_after(now))
    return stretch
