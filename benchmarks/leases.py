"""Leases on request traces, in virtual time: hit rate and time of sessions with, without, and with the next turn known.

    python -m benchmarks.leases [--requests N] [--jobs N] [--seeds N]

The proxy's own code decides which prompts get a lease, and how long it lasts. A trace does not show which turns wait
for a tool: every answer counts as one that does, save a session's last, after which the session ends. The engines' own
memory is cut to the share that is named; prompts are pinned in each engine's host memory, of as much and of four times
as much, read at 20 GB/s, or in a store that all engines share, of twice an engine's memory, read at 2.5 GB/s. Beside
them the memory that prompts are pinned in evicts the block needed last, with the time of each session's next turn
known; and the bound: it has room for all. Writes leases.md and leases.json of benchmarks/reports."""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from random import Random
from typing import Any

from benchmarks.by_trace import Rows, measure_traces
from benchmarks.markdown import table
from benchmarks.routing_cells import capacity_tokens_of, trace_of
from kvproxy.cache.actions.hotness import KnownPrefix
from kvproxy.features.leases.leases import IdleConversation, Lease, LeaseBook, choose_duration
from kvproxy.features.leases.settings import LeaseSettings
from kvproxy.lab.replay.compare import PolicySpec
from kvproxy.lab.replay.pooled import measure_bound
from kvproxy.lab.replay.results import summarize_outcomes
from kvproxy.lab.replay.router import LiveRequest, Placement, SimEndpoint, VirtualRouter
from kvproxy.lab.replay.settings import Pace, ReplayFleet, TierPlan
from kvproxy.lab.replay.trace import Trace
from kvproxy.lab.replay.view import IndexView, endpoint_id
from kvproxy.lab.replay.virtual_time import VirtualTime
from kvproxy.lab.simulator.engine import Engine
from kvproxy.lab.simulator.engine_io import KvEvent
from kvproxy.lab.simulator.lower_tiers import LowerTier
from kvproxy.lab.simulator.retention import Eviction, Future, TierSettings

#: Shares of an engine's memory that are left: enough for what runs, and too little for all that pauses.
MEMORY = {"cc_dev": 0.125, "agent_dev": 0.01}
LOAD, INSTANCES = 0.9, 8
STORE = 2.0  # of an engine's memory that is left
HOSTS = (1.0, 4.0)  # the same
NOTE = (
    "What leases gain is what pins keep in host memory that is too small for all (cc_dev, as much as the "
    "engine's). Where there is room for all nothing is lost that could be kept. Where memory is far too small, "
    "what is held for one session is taken from another: to know each next turn exactly gains nothing there "
    "either, while the bound, which takes from no session, is far off: what is missing is memory. On agent_dev "
    "the bound itself is little."
)
FAR_S = 1e12


@dataclass(frozen=True)
class Cell:
    """One run on a trace."""

    memory: float  # share of an engine's memory that is left
    host: float  # of that, of each engine; 0: none
    store: float  # of that, in all engines together; 0: none
    mode: str  # one of MODES


#: Without leases, with them, where eviction knows every next turn, and where nothing is lost over a pause.
MODES = ("without", "leases", "known", "kept")
ROOM = 64.0  # of an engine's memory that is left, below it: for all


def cells_of(trace: str) -> tuple[Cell, ...]:
    """Pins in host memory, and in a store."""
    memory = MEMORY[trace]
    plans = (*((memory, host, 0.0) for host in HOSTS), (memory, 0.0, STORE))
    return tuple(Cell(*plan, mode) for plan in plans for mode in MODES)


class NextTurns(Future):
    """Times at which sessions that an engine served last go on, known as soon as a turn is over. Blocks that no session
    in progress needs are needed after all others, the longest unused last."""

    def __init__(self) -> None:
        super().__init__(())
        self._goes_on: defaultdict[int, dict[int, float]] = defaultdict(dict)  # by block and session
        self._used: dict[int, int] = {}  # by block: the number of the prompt
        self._prompts = 0

    def note_prompt(self, block_hashes: Iterable[int]) -> None:
        self._prompts += 1
        self._used.update(dict.fromkeys(block_hashes, self._prompts))

    def expect_turn(self, session: int, blocks: Sequence[int], at: float) -> None:
        """Expect the session to need these blocks then."""
        for block in blocks:
            self._goes_on[block][session] = at

    def forget_turn(self, session: int, blocks: Sequence[int]) -> None:
        """Forget a turn that has come, or will not."""
        for block in blocks:
            self._goes_on[block].pop(session, None)

    def next_use(self, block: int) -> float:
        return min(self._goes_on[block].values(), default=FAR_S - self._used.get(block, 0))


class PinnedStore(LowerTier):
    """LMCache's L1 or L2 with counted pins: eviction passes over what has one."""

    def __init__(self, settings: TierSettings, *, future: Future | None = None) -> None:
        super().__init__(settings, future=future)
        self._pins: Counter[int] = Counter()

    def pin(self, blocks: Sequence[int], by: int) -> None:
        """Once more, or once less."""
        for block in blocks:
            self._pins[block] += by

    def _give_up(self) -> Iterator[KvEvent]:
        if self._ranking is not None:
            yield from super()._give_up()
            return
        for _ in range(len(self._held)):
            block = next(iter(self._held))
            if self._pins[block] <= 0:
                break
            self._held.move_to_end(block)
        yield from super()._give_up()


class LeasedTime(VirtualTime):
    """A run in which answers are followed by leases."""

    def __init__(
        self, *args: Any, stores: Sequence[PinnedStore], leases: bool, known: Sequence[NextTurns], **others: Any,
    ) -> None:  # fmt: skip
        super().__init__(*args, **others)
        self._known = known
        self._stores = stores  # by engine, which may be the same one
        self._leased = leases
        self._settings = LeaseSettings(enabled=True, tenant_tokens=10**9)
        self.book = LeaseBook(most=100_000)
        self._blocks_of: dict[int, array[int]] = {}
        self.counts: Counter[str] = Counter()

    def _arrive(self, turn_of_session: tuple[int, int], now: float) -> None:
        session, number = turn_of_session
        if self._goes_on(session, number):
            self.book.note_return([session], now)
        super()._arrive(turn_of_session, now)

    def _goes_on(self, session: int, number: int) -> bool:
        """Return True if the turn's prompt begins with the one before it, but for its last block."""
        turns = self._blocks.trace.sessions[session].turns
        before = turns[number - 1].blocks[:-1] if number else turns[number].blocks
        return bool(number) and turns[number].blocks[: len(before)] == before

    def _finish(self, placement: Placement, now: float) -> None:
        super()._finish(placement, now)
        request = placement.request
        outcome, session = request.outcome, request.session
        if self._known:
            self._know_next(request, now)
        if not self._leased or outcome.first_token_at is None:
            return
        endpoint = self._router.endpoints[outcome.endpoint]
        lease = self.book.take_returned([session])
        if lease is not None:
            there = "broken" if str(outcome.endpoint) == lease.instance else "elsewhere"
            self.counts["kept" if outcome.cached_tokens >= lease.reusable_tokens else there] += 1
            self._unpin(lease)
        if request.number + 1 < len(self._blocks.trace.sessions[session].turns):
            self._hold(request, endpoint, now)

    def _submit(self, placement: Placement, now: float) -> None:
        request = placement.request
        if self._known:
            self._known[placement.endpoint.index].expect_turn(request.session, request.turn.blocks, now)
        super()._submit(placement, now)

    def _know_next(self, request: LiveRequest, now: float) -> None:
        session, following = request.session, request.number + 1
        turns = self._blocks.trace.sessions[session].turns
        for each in self._known:
            each.forget_turn(session, request.turn.blocks)
        if following < len(turns):
            blocks = self._blocks.turn(session, following).blocks
            self._known[request.outcome.endpoint].expect_turn(session, blocks, now + turns[following].delay_s)

    def _hold(self, request: LiveRequest, endpoint: SimEndpoint, now: float) -> None:
        session, blocks = request.session, request.turn.blocks
        waiting = IdleConversation(session, now, endpoint.id, "")
        self.book.waiting.add(waiting)
        duration_s = choose_duration(waiting, self._settings)
        tokens = array("I", bytes(4 * request.turn.prompt_tokens))
        prefix = KnownPrefix(session, "", "", deque(), whole=session, tokens=tokens)
        lease = Lease(waiting, prefix, str(endpoint.index), now, now + duration_s, held=True)
        refusal = self.book.grant(lease, self._settings)
        self.counts[refusal or "granted"] += 1
        if not refusal:
            self._blocks_of[session] = blocks
            self._pin(lease, blocks, 1)

    def _unpin(self, lease: Lease) -> None:
        self._pin(lease, self._blocks_of.pop(lease.of.key), -1)

    def _pin(self, lease: Lease, blocks: Sequence[int], by: int) -> None:
        self._stores[int(lease.instance)].pin(blocks, by)

    def _scrape(self, what: None, now: float) -> None:
        super()._scrape(what, now)
        for lease, why in self.book.take_expired(now):
            self.counts[why] += 1
            self._unpin(lease)


def play(trace: Trace, pace: Pace, fleet: ReplayFleet, cell: Cell, seed: int) -> dict[str, Any]:
    """One run; with the pooled pace of an undisturbed fleet."""
    if cell.mode == "kept":
        cell = replace(cell, host=cell.host and ROOM, store=cell.store and ROOM)
    plan = TierPlan(device=cell.memory, host=0.0, shared=cell.store)
    known: list[NextTurns] = []  # by engine
    if cell.mode == "known":
        known = [NextTurns()] * fleet.instances if cell.store else [NextTurns() for _ in range(fleet.instances)]
    fleet = replace(fleet, tiers=plan, eviction=Eviction.LRU)
    blocks, duration_s = fleet.blocks_of(trace), pace.duration_s(trace)
    settings = [fleet.engine_settings(blocks.size, index, duration_s) for index in range(fleet.instances)]
    stores = _stores(fleet, cell, settings[0].capacity_blocks, blocks.size, known)
    endpoints = [
        SimEndpoint(endpoint_id(index), index, Engine(each, store=store))
        for index, (each, store) in enumerate(zip(settings, stores, strict=True))
    ]
    policy = PolicySpec.parse("kv_aware").make(rng=Random(seed))
    view = IndexView(fleet, blocks.size, rng=Random(seed + 1))
    router = VirtualRouter(endpoints, policy, view)
    jitter = Random(seed + 3)
    run = LeasedTime(blocks, pace, router, view, jitter=jitter, stores=stores,
                     leases=cell.mode == "leases", known=known)  # fmt: skip
    summary = summarize_outcomes(run.run(), fleet.instances)
    return {
        "requests": summary.requests, "failed": summary.failed, "hit_ratio": round(summary.hit_rate, 4),
        "ttft_mean_s": round(summary.ttft_mean_s, 5), "session_mean_s": round(summary.session_mean_s, 3),
        "counts": dict(run.counts),
    }  # fmt: skip


def _stores(
    fleet: ReplayFleet, cell: Cell, capacity_blocks: int, block_size: int, known: Sequence[NextTurns]
) -> list[PinnedStore]:
    """By engine: the one that all of them read, or its own host memory."""
    eviction = Eviction.OPTIMUM if known else Eviction.LRU
    if cell.store:
        assert fleet.tiers is not None
        shared = fleet.tiers.shared_tier(capacity_blocks, block_size, eviction)
        return [PinnedStore(shared, future=known[0] if known else None)] * fleet.instances
    [host] = TierPlan(host=cell.host).own_tiers(capacity_blocks, block_size, eviction)
    return [PinnedStore(host, future=known[index] if known else None) for index in range(fleet.instances)]


@dataclass(frozen=True)
class Job:
    """All cells of one trace, in another process."""

    requests: int
    seeds: int

    def __call__(self, name: str) -> list[dict[str, Any]]:
        fleet = ReplayFleet(instances=INSTANCES, capacity_tokens=capacity_tokens_of(name))
        bound = measure_bound(trace_of(name).cut(self.requests), fleet, LOAD)
        trace = bound.trace.cut(self.requests)
        return [
            {"trace": name, **asdict(cell), "seed": seed, **play(trace, bound.pace, fleet, cell, seed)}
            for cell in cells_of(name)
            for seed in range(1, self.seeds + 1)
        ]


def as_markdown(rows: Rows, command: str) -> str:
    """Render the report."""
    lines = [
        "# Leases: what keeping prompts over pauses is worth in virtual time", "",
        f"`{command}`. {INSTANCES} simulated engines under `kv_aware`, at {LOAD} of what they serve with all of their "
        "memory in one pool, means of the seeds. Every answer but a session's last one counts as one that waits for a "
        "tool. Of each four figures the first is without leases, the second with them, "
        "the third is without, but it is known when each session goes on, and the memory that prompts are "
        "pinned in gives up first what is needed last; the fourth is the bound, the "
        "same memory with room for all, so that no prompt is lost over a pause. `to without`: those three, and from "
        "the least to the most of the seeds.",
    ]  # fmt: skip
    shown = []
    for trace in dict.fromkeys(row["trace"] for row in rows):
        for cell in (one for one in cells_of(trace) if one.mode == "leases"):
            runs = [
                [row for row in rows if row["trace"] == trace and all(
                    row[name] == value for name, value in asdict(replace(cell, mode=mode)).items())]
                for mode in MODES
            ]  # fmt: skip
            shown.append(_row(trace, cell, *runs))
    lines += table(_HEADS, shown)
    lines += ["", NOTE]
    return "\n".join(lines) + "\n"


_HEADS = (
    "trace", "memory, pins", "hit ratio", "session (s)", "to without", "mean TTFT (ms)", "promises kept", "elsewhere",
    "granted",
)  # fmt: skip


def _row(trace: str, cell: Cell, *runs: Sequence[dict[str, Any]]) -> list[object]:
    def means(figure: str, scale: float = 1.0) -> list[float]:
        return [scale * sum(float(row[figure]) for row in rows) / len(rows) for rows in runs]

    counts: Counter[str] = Counter()
    for row in runs[1]:
        counts.update(row["counts"])
    verified = counts["kept"] + counts["broken"]
    pinned = f"in host memory ({cell.host:g}x)" if cell.host else "in a store"
    sessions, ttfts = means("session_mean_s"), means("ttft_mean_s", 1000)
    return [
        trace,
        f"{cell.memory:g}, {pinned}",
        ", ".join(f"{one:.3f}" for one in means("hit_ratio")),
        ", ".join(f"{one:.0f}" for one in sessions),
        ", ".join(_ratios(runs[0], each) for each in runs[1:]),
        ", ".join(f"{one:.0f}" for one in ttfts),
        f"{counts['kept'] / max(1, verified):.1%}",
        counts["elsewhere"],
        counts["granted"],
    ]


def _ratios(without: Sequence[dict[str, Any]], runs: Sequence[dict[str, Any]]) -> str:
    """Of the sessions' time, seed by seed: the mean and the range."""
    each = [b["session_mean_s"] / a["session_mean_s"] for a, b in zip(without, runs, strict=True)]
    return f"{sum(each) / len(each):.3f} ({min(each):.2f} to {max(each):.2f})"


if __name__ == "__main__":
    measure_traces(__doc__ or "", job=Job, as_markdown=as_markdown, traces=tuple(MEMORY), requests=1500, seeds=3)
