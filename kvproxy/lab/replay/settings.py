"""Setup of a replay: engines, the router's information about them, and a trace's prompts for an engine."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import chain
from random import Random
from typing import ClassVar

from kvproxy.cluster.settings import EndpointRole
from kvproxy.lab.replay.trace import Trace, TraceError, Turn
from kvproxy.lab.replay.transfers import LinkPlan
from kvproxy.lab.simulator.engine_io import EngineSettings, Scheduling
from kvproxy.lab.simulator.lower_tiers import LowerTier
from kvproxy.lab.simulator.retention import Eviction, Future, TierSettings
from kvproxy.lab.simulator.timing import EngineTiming

#: By how much at most a seed moves the start of a session.
JITTER_S = 0.5

#: Common English words, each one token (with its space) to most tokenizers.
_WORDS = (  # noqa: SIM905 - a list literal would be 60 lines
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work number night point home water room mother area money "
    "story fact month lot right study book eye job word business issue side kind head house service friend father power"
).split()


class IndexMode(StrEnum):
    """Router's source of information about caches."""

    EVENTS = "events"  # KV events of the engines, and the router's own placements
    APPROXIMATE = "approximate"  # only the router's own placements


@dataclass(frozen=True, slots=True)
class TierPlan:
    """Host memory and disk below the engines', and a store that they share: sizes in multiples of an engine's memory as
    it is cut to `device`, speeds in bytes a second. A token's KV is that of a model of 32 layers with 8 KV heads of 128
    values in two bytes: 128 KiB. Engines' blocks are written to host memory at once; the disk gets those that host
    memory evicts."""

    device: float = 1.0  # share that is left of an engine's memory
    host: float = 4.0
    gb_per_s: float = 20.0
    disk: float = 0.0
    disk_gb_per_s: float = 5.0
    shared: float = 0.0  # of all engines together
    shared_gb_per_s: float = 2.5
    latency_s: float = 0.001  # of a read
    failing_reads: int = 0  # one of this many host reads fails
    kv_bytes_per_token: int = 131_072

    #: In the text of an option.
    NAMES: ClassVar[Mapping[str, str]] = {
        "device": "device",
        "host": "host",
        "gbps": "gb_per_s",
        "disk": "disk",
        "disk_gbps": "disk_gb_per_s",
        "shared": "shared",
        "shared_gbps": "shared_gb_per_s",
        "latency": "latency_s",
        "failing_reads": "failing_reads",
    }

    @classmethod
    def parse(cls, text: str) -> TierPlan:
        """Of `device=0.25,host=4,gbps=20` and the like. Raises ValueError with what is possible."""
        found: dict[str, float] = {}
        for each in text.split(","):
            name, _, value = each.strip().partition("=")
            try:
                found[cls.NAMES[name]] = int(value) if value.isdecimal() else float(value)
            except (KeyError, ValueError):
                raise ValueError(
                    f"--tiers takes numbers for {', '.join(cls.NAMES)}, as in device=0.25,host=4,gbps=20; not {each!r}"
                ) from None
        plan = cls(**found)  # type: ignore[arg-type]
        plan._check()
        return plan

    def own_tiers(self, capacity_blocks: int, block_size: int, eviction: Eviction) -> tuple[TierSettings, ...]:
        """Of an engine with so many blocks, the nearest first."""
        tiers = []
        if self.host:
            room = self._room(self.host, capacity_blocks)
            read_s = self._read_s(self.gb_per_s, block_size)
            tiers.append(TierSettings("CPU", room, read_s, self.latency_s, self.failing_reads, eviction=eviction))
        if self.disk:
            room = self._room(self.disk, capacity_blocks)
            read_s = self._read_s(self.disk_gb_per_s, block_size)
            tiers.append(TierSettings("DISK", room, read_s, self.latency_s, below=True, eviction=eviction))
        return tuple(tiers)

    def shared_tier(self, capacity_blocks: int, block_size: int, eviction: Eviction) -> TierSettings:
        """Of engines with so many blocks each."""
        room = self._room(self.shared, capacity_blocks)
        read_s = self._read_s(self.shared_gb_per_s, block_size)
        return TierSettings("EXTERNAL", room, read_s, self.latency_s, eviction=eviction)

    def _room(self, multiple: float, capacity_blocks: int) -> int:
        return max(1, round(multiple * capacity_blocks))

    def _read_s(self, gb_per_s: float, block_size: int) -> float:
        return block_size * self.kv_bytes_per_token / 1e9 / gb_per_s

    def _check(self) -> None:
        sizes = (self.host, self.disk, self.shared, self.latency_s)
        speeds = (self.gb_per_s, self.disk_gb_per_s, self.shared_gb_per_s)
        if not 0 < self.device <= 1 or min(*sizes, self.failing_reads) < 0 or min(speeds) <= 0:
            raise ValueError("--tiers: device is a share above 0, sizes are not negative, and speeds are above 0")
        if not isinstance(self.failing_reads, int):
            raise ValueError("--tiers: failing_reads is a whole number")


@dataclass(frozen=True, slots=True)
class ReplayFleet:
    """The simulated engines and what the router sees of them."""

    instances: int = 8
    capacity_tokens: int = 819_200  # of each engine's cache
    block_size: int = 0  # of the engines; 0: the trace's
    max_batched_tokens: int = 2048  # a step
    max_sequences: int = 256
    long_prefill_token_threshold: int = 0
    scheduling: Scheduling = Scheduling.FCFS
    reuse_outputs: bool = False  # an answer's blocks are found by the next turn, as vLLM does
    timing: EngineTiming = field(default_factory=EngineTiming)
    slowness: tuple[float, ...] = ()  # of the first endpoints; the others are at 1
    slow_middle: float = 1.0  # the first endpoint's slowness during the middle third of the run
    joins: tuple[tuple[int, float], ...] = ()  # (engine, share of the run): it comes, cold; not there before
    leaves: tuple[tuple[int, float], ...] = ()  # it is lost with its requests in flight; it may join again
    index: IndexMode = IndexMode.EVENTS
    index_delay_s: float = 0.0
    index_capacity: float = 1.0  # share of the true capacity that the approximate index is given
    learn_capacity: bool = True  # correct it by reported reuse; only without events, as in the proxy
    wrong_share: float = 0.0  # of predictions that claim a prefix the endpoint does not hold
    tiers: TierPlan | None = None  # below the engines' memory
    eviction: Eviction = Eviction.LRU  # in engine memory and below
    link: LinkPlan | None = None  # between them
    reports_cached: bool = True  # engines report their cached tokens; else always 0
    prefill: int | None = None  # engines that prefill for the others; 0: all for all; None: prompts stay where they are
    pull_s_per_token: float = 131_072 / 12.5e9  # a link of 12.5 GB/s, where a token's KV is 128 KiB

    def __post_init__(self) -> None:
        there = self.there_at_first()
        sizes = [len(there)]
        known = range(self.instances)
        for _, index, joins in self.changes():
            (there.add if joins else there.discard)(index)
            sizes.append(len(there))
        if not all(sizes) or any(index not in known for index, _ in (*self.joins, *self.leaves)):
            raise ValueError("engines that join and leave are numbered from 0, and one is always there")
        if self.prefill is not None and (self.joins or self.leaves):
            raise ValueError("where engines prefill for others, none joins or leaves")

    def role_of(self, index: int) -> EndpointRole:
        """Return the part of requests that an engine computes."""
        if not self.prefill:
            return EndpointRole.BOTH
        return EndpointRole.PREFILL if index < self.prefill else EndpointRole.DECODE

    def changes(self) -> list[tuple[float, int, bool]]:
        """(share of the run, engine, whether it joins) in order."""
        leaves = [(share, index, False) for index, share in self.leaves]
        return sorted([*leaves, *((share, index, True) for index, share in self.joins)])

    def there_at_first(self) -> set[int]:
        """Engines that do not begin by joining."""
        first = {index: joins for _, index, joins in reversed(self.changes())}
        return {index for index in range(self.instances) if not first.get(index)}

    def answering_at_first(self) -> list[int]:
        """Engines of them that do not prefill alone."""
        return [index for index in sorted(self.there_at_first()) if self.role_of(index) is not EndpointRole.PREFILL]

    def undisturbed(self) -> ReplayFleet:
        """Return the same fleet with every engine alike and always as fast, all KV in its memory, and the longest
        unused evicted: what loads are stated for."""
        still = {
            "slowness": (),
            "slow_middle": 1.0,
            "joins": (),
            "leaves": (),
            "tiers": None,
            "link": None,
            "prefill": None,
        }
        return replace(self, **still, eviction=Eviction.LRU)  # type: ignore[arg-type]

    def blocks_of(self, trace: Trace) -> EngineBlocks:
        """Return the trace as these engines see it."""
        return EngineBlocks(trace, self.block_size, reuse_outputs=self.reuse_outputs)

    def engine_settings(self, block_size: int, index: int, duration_s: float) -> EngineSettings:
        """Return the settings of one engine; the trace's blocks are the engine's."""
        timing = replace(self.timing, slowness=self.slowness[index] if index < len(self.slowness) else 1.0)
        if index == 0 and self.slow_middle != 1.0:
            third = duration_s / 3
            timing = replace(timing, slowness_changes=((third, self.slow_middle), (2 * third, timing.slowness)))
        plan = self.tiers
        capacity_blocks = self.capacity_tokens // block_size
        if plan is not None:
            capacity_blocks = max(1, round(plan.device * capacity_blocks))
        return EngineSettings(
            capacity_blocks=capacity_blocks,
            block_size=block_size,
            max_batched_tokens=self.max_batched_tokens,
            max_sequences=self.max_sequences,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            scheduling=self.scheduling,
            timing=timing,
            kv_events=self.index is IndexMode.EVENTS,
            tiers=() if plan is None else plan.own_tiers(capacity_blocks, block_size, self.eviction),
            eviction=self.eviction,
        )

    def shared_store(self, block_size: int, *, future: Future | None = None) -> LowerTier | None:
        """Return what the engines share below their own tiers."""
        if self.tiers is None or not self.tiers.shared:
            return None
        capacity_blocks = round(self.tiers.device * self.capacity_tokens) // block_size
        return LowerTier(self.tiers.shared_tier(capacity_blocks, block_size, self.eviction), future=future)

    def future_of(self, blocks: EngineBlocks) -> Future | None:
        """When the trace's blocks are needed, where eviction goes by that."""
        if self.eviction is not Eviction.OPTIMUM:
            return None
        arrivals = sorted(Pace(closed_loop=False).arrivals(blocks.trace))
        return Future([blocks.left_by(session, number) for _, session, number in arrivals])


#: Fleets to begin from, by name. `h100`: as a vLLM server sets itself up on an H100, with steps that never take less
#: than reading the weights does.
ENGINES: Mapping[str, ReplayFleet] = {
    "default": ReplayFleet(),
    "h100": ReplayFleet(
        max_batched_tokens=8192, max_sequences=1024, reuse_outputs=True, timing=EngineTiming(prefill_floor_s=0.008)
    ),
}


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast a trace is played: `scale` multiplies the times at which sessions start; within a session delays stay
    what they are. Closed loop starts a turn after the end of the one before it, open loop as if each took `service_s`.
    Where a closed loop has `sessions_at_once`, further ones begin as others end.
    """

    scale: float = 1.0
    closed_loop: bool = True
    service_s: float = 5.0
    sessions_at_once: int = 0  # 0: no bound

    def duration_s(self, trace: Trace) -> float:
        """About when the last request comes."""
        return max(at for at, _, _ in replace(self, closed_loop=False).arrivals(trace))

    def arrivals(self, trace: Trace, *, jitter: Random | None = None) -> list[tuple[float, int, int]]:
        """Open-loop (time, session, turn) of every request, or of every session's first; with `jitter` every session
        starts up to JITTER_S later."""
        arrivals = []
        for number, session in enumerate(trace.sessions):
            at = session.start_s * self.scale + (jitter.uniform(0.0, JITTER_S) if jitter is not None else 0.0)
            for turn_number, turn in enumerate(session.turns[: 1 if self.closed_loop else None]):
                at += turn.delay_s
                arrivals.append((at, number, turn_number))
                at += self.service_s
        return arrivals


class EngineBlocks:
    """Turns in blocks of `block_size` tokens, of which a trace's block is a multiple; 0: in the trace's own.

    Of a prompt's last tokens, which fill no block of the trace, nothing is known, in smaller blocks either. With
    `reuse_outputs` an answer's blocks are found by the next turn, as engines do that hash what they generate.
    """

    def __init__(self, trace: Trace, block_size: int = 0, *, reuse_outputs: bool = False) -> None:
        self.trace = trace
        self.size = block_size or trace.block_size
        self._reuse_outputs = reuse_outputs
        self._parts, rest = divmod(trace.block_size, self.size)
        if rest or not self._parts:
            whole = trace.block_size
            raise TraceError(f"{trace.name}: its blocks of {whole} tokens are not made of {block_size} each")

    def turn(self, session: int, number: int) -> Turn:
        """One turn for an engine."""
        return self.split(self.trace.sessions[session].turns[number])

    def split(self, turn: Turn) -> Turn:
        """Return a turn for an engine. Made when it is played: a long one has thousands of them."""
        if self._parts == 1:
            return turn
        parts = (range(block * self._parts, (block + 1) * self._parts) for block in turn.blocks)
        return replace(turn, blocks=array("Q", chain.from_iterable(parts)))

    def left_by(self, session: int, number: int) -> array[int]:
        """Return the blocks of a turn once it is answered: those of its prompt and, if the next turn's prompt continues
        it and is long enough to hold the answer, those it shares with that. (A trace has no prompt texts: the answer is
        assumed to come next, as in a chat's history.)"""
        turns = self.trace.sessions[session].turns
        turn = self.turn(session, number)
        computed = turn.prompt_tokens + turn.output_tokens - 1  # the last token's KV is never needed
        if not self._reuse_outputs or number + 1 == len(turns) or turns[number + 1].prompt_tokens <= computed:
            return turn.blocks
        following = self.turn(session, number + 1).blocks[: computed // self.size]
        return following if following[: len(turn.blocks)] == turn.blocks else turn.blocks


def make_prompt(turn: Turn, block_size: int) -> str:
    """About `turn.prompt_tokens` tokens: a text for each whole block, then a tail no other request has."""
    pieces = [make_block(block, block_size) for block in turn.blocks]
    rest = turn.prompt_tokens - len(turn.blocks) * block_size
    if rest > 0:
        last = turn.blocks[-1] if turn.blocks else 0
        pieces.append(make_block((last << 20) + turn.prompt_tokens, rest))
    return " ".join(pieces)


def make_block(block: int, tokens: int) -> str:
    """Return the same words for the same block, its id spelled out first so that no two blocks are alike."""
    base = len(_WORDS)
    state = block
    digits = []
    left = block
    while left:
        digits.append(left % base)
        left //= base
    words = [_WORDS[digit] for digit in (len(digits), *digits)]  # no id's spelling begins another's
    while len(words) < tokens:
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        words.append(_WORDS[(state >> 33) % base])
    return " ".join(words[: max(1, tokens)])
