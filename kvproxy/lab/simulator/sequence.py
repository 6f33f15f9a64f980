"""The requests of a simulated engine: how far each is, the line in which they wait, and the slots of their adapters."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count

from kvproxy.lab.simulator.engine_io import BlockStored, ExtraKeys, Scheduling, SimRequest
from kvproxy.lab.simulator.media import media_keys

#: Names of running and waiting requests, and the last time an engine step had them.
Combination = tuple[str, str]


class LoraSlots:
    """An adapter stays loaded until another one needs its slot, the one least recently used first. `slots` 0: there is
    room for all."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._loaded: OrderedDict[str, None] = OrderedDict()
        self._seen: dict[Combination, float] = {}

    @property
    def seen(self) -> Mapping[Combination, float]:
        """Every combination there was; vLLM shows them all for ever."""
        return self._seen

    def admits(self, adapter: str | None, running: Iterable[str | None]) -> bool:
        """Return True if a request for the adapter may run beside the running ones. (vLLM skips a request that may not;
        here it holds up those behind it.)"""
        in_use = {each for each in running if each is not None}
        return not self._slots or adapter is None or adapter in in_use or len(in_use) < self._slots

    def take_slot(self, adapter: str | None, running: Iterable[str | None]) -> bool:
        """Take a slot for a request that begins; returns True if the adapter has to be loaded first."""
        if adapter is None:
            return False
        missing = adapter not in self._loaded
        self._loaded[adapter] = None
        self._loaded.move_to_end(adapter)
        in_use = set(running)
        while self._slots and len(self._loaded) > self._slots:
            del self._loaded[next(each for each in self._loaded if each not in in_use)]
        return missing

    def note_step(self, running: Iterable[str | None], waiting: Iterable[str | None], now: float) -> None:
        """How it stands in an engine step."""
        names = [",".join(sorted({each for each in some if each is not None})) for some in (running, waiting)]
        self._seen[names[0], names[1]] = now


@dataclass(slots=True, eq=False)
class Sequence:
    """Progress of one request. `computed` tokens have their KV in `blocks`; `target` must be reached before the next
    token comes out of a prefill. While decoding, the newest token's KV is not computed yet."""

    request: SimRequest
    submitted_at: float
    admitted_at: float | None = None
    cached_tokens: int = 0
    generated: int = 0
    gone: bool = False
    blocks: list[int] = field(default_factory=list)
    hashed: int = 0
    computed: int = 0
    target: int = 0

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Back to the waiting line with nothing computed; what was generated is computed again with the prompt."""
        self.blocks = []
        self.hashed = 0
        self.computed = 0
        self.target = self.request.prompt_tokens + self.generated

    @property
    def urgency(self) -> tuple[int, float]:
        """Sort key of priority scheduling: the lowest first."""
        return self.request.priority, self.submitted_at

    @property
    def remaining(self) -> int:
        """Tokens still to generate."""
        return self.request.output_tokens - self.generated

    def stored_event(
        self, first: int, last: int, block_size: int, *, parent: int | None, lookahead_tokens: int = 0
    ) -> BlockStored:
        """Return the event for blocks `first` up to, not including, `last`."""
        request = self.request
        end = last * block_size + lookahead_tokens
        return BlockStored(
            block_hashes=tuple(request.block_hashes[first:last]),
            parent=parent,
            token_ids=tuple(request.token_ids[first * block_size : end]),
            lora_id=request.lora_id,
            lora_name=request.lora_name,
            extra_keys=tuple(self._extra_keys(block, block_size) for block in range(first, last))
            if request.token_ids
            else (),
        )

    def _extra_keys(self, block: int, block_size: int) -> ExtraKeys | None:
        request = self.request
        lora = (request.lora_name,) if request.lora_name is not None else ()
        salt = (request.cache_salt,) if request.cache_salt is not None and block == 0 else ()
        media = media_keys(request.media, block, block_size) if request.media else ()
        return (*lora, *media, *salt) or None


class WaitingLine:
    """Sequences that wait for admission, in the order of vLLM's two policies: as they came, those that were preempted
    in front; or the lowest priority first and then the earliest arrival, preempted or not."""

    def __init__(self, scheduling: Scheduling) -> None:
        self._by_priority = scheduling is Scheduling.PRIORITY
        self._heap: list[tuple[float, float, int, Sequence]] = []
        self._waiting: dict[str, Sequence] = {}
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting.values())

    def add(self, sequence: Sequence) -> None:
        self._push(sequence, next(self._numbers))

    def put_back(self, sequence: Sequence) -> None:
        self._push(sequence, -next(self._numbers))

    def first(self) -> Sequence:
        """Return the next one to admit; the line is not empty."""
        while self._waiting.get(self._heap[0][3].request.id) is not self._heap[0][3]:
            heapq.heappop(self._heap)
        return self._heap[0][3]

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, if it is here."""
        if self._waiting.get(sequence.request.id) is sequence:
            del self._waiting[sequence.request.id]
            if self._heap[0][3] is sequence:
                heapq.heappop(self._heap)
            elif len(self._heap) > 2 * len(self._waiting) + 16:
                self._heap = [entry for entry in self._heap if self._waiting.get(entry[3].request.id) is entry[3]]
                heapq.heapify(self._heap)

    def _push(self, sequence: Sequence, number: int) -> None:
        urgency = sequence.urgency if self._by_priority else (0, 0.0)
        self._waiting[sequence.request.id] = sequence
        heapq.heappush(self._heap, (*urgency, number, sequence))
