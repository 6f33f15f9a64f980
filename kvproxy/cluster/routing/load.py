"""Load ledger of one endpoint: counted by reservation, never guessed. Pure; the time is an argument.

Besides the counts it estimates how long a new request would wait for its prefill, and collects the samples that a speed
model learns from.

An answer that is not streamed hides its first token behind its whole decode. Engines prefill in order of arrival, so
such a request is taken as prefilled when a later one shows its first token or ends, or when its estimated time has
passed (`advance`); its speed is learned from the engine's own counters (engine_samples.py)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Protocol

import msgspec

from kvproxy.base.types import LowerTokens
from kvproxy.cluster.routing.remote_load import LoadRow, RemoteLoad, list_head
from kvproxy.cluster.routing.samples import GROUP_GAP_S, OnSample, OpenSample
from kvproxy.cluster.routing.work import (
    HEAD_REQUESTS,
    HEAD_TOKENS,
    IDLE,
    MAX_PROGRESS,
    NO_WORK,
    OVERDUE,
    Backlog,
    Features,
    PromptSplit,
    difference,
    features_of,
    head_of,
    seconds_of,
    sum_of,
)


class EngineState(msgspec.Struct, frozen=True):
    """One scrape at `read_at`. None: this engine does not report the number."""

    read_at: float
    capacity_tokens: int | None = None  # tokens of KV memory
    running: int | None = None  # admitted requests
    waiting: int | None = None  # requests not admitted yet


class LiveBlocks:
    """Ledger by block hash, as large as the prompts in flight. Hashes are chained: a live block's ancestors are live.

    Kept only if a policy needs it (`Policy.counts_live_blocks`), and updated by the load ledger's reservations."""

    __slots__ = ("_requests",)

    def __init__(self) -> None:
        self._requests: dict[int, int] = {}  # by hash: requests in flight whose prompt has the block

    def __len__(self) -> int:
        """Distinct blocks."""
        return len(self._requests)

    def __repr__(self) -> str:
        return f"<LiveBlocks {len(self)} distinct of {sum(self._requests.values())}>"

    def count_leading(self, hashes: Sequence[int]) -> int:
        """Leading blocks of a prompt that are live: found by bisection, since what is live is closed under prefixes."""
        requests = self._requests
        low = 0
        high = len(hashes)
        while low < high:
            middle = (low + high) // 2
            if hashes[middle] in requests:
                low = middle + 1
            else:
                high = middle
        return low

    def add(self, hashes: Sequence[int]) -> None:
        """Count the blocks of a request that begins."""
        requests = self._requests
        for block in hashes:
            requests[block] = requests.get(block, 0) + 1

    def remove(self, hashes: Sequence[int]) -> None:
        """Remove the blocks of a request that ends."""
        requests = self._requests
        for block in hashes:
            count = requests[block]
            if count == 1:
                del requests[block]
            else:
                requests[block] = count - 1


class LoadWatch(Protocol):
    """Listener to one ledger's changes and samples; its methods must be short."""

    def load_changed(self) -> None:
        """React to a change of the ledger."""
        ...

    def sampled(self, work: Features, busy_s: float, *, scraped: bool) -> None:
        """Take a closed sample."""
        ...


class Reservation(msgspec.Struct, eq=False):
    """One request's share of an endpoint's load. Settled exactly once, on every exit."""

    uncached_tokens: int
    cached_tokens: int
    started_at: float
    features: Features  # its prefill work
    lower: LowerTokens = ()  # of the cached ones, which are on lower tiers
    hidden: bool = False  # its first token cannot be seen
    known: bool = True  # what the endpoint holds of its prompt was looked for; else its prefill teaches nothing
    live: tuple[LiveBlocks, Sequence[int]] | None = None  # blocks of its prompt, and the ledger that counts them
    first_token_at: float | None = None
    released: bool = False


class EndpointLoad:
    """Requests in flight on one endpoint.

    `on_sample` receives its samples. A request that leaves before its first token voids the open sample: the engine may
    have done an unknown part of its work. So does the first token of an unknown prompt."""

    __slots__ = (
        "_begun",
        "_busy_at",
        "_head",
        "_head_s",
        "_oldest_s",
        "_pending",
        "_prefilled",
        "_priced_at",
        "_sample",
        "_shown_at",
        "_work",
        "_work_s",
        "engine",
        "hidden_requests",
        "in_flight",
        "kept_since",
        "live",
        "on_sample",
        "pending_tokens",
        "remote_load",
        "resident_tokens",
        "watch",
    )

    def __init__(self, *, on_sample: OnSample | None = None) -> None:
        self.on_sample = on_sample
        self.in_flight = 0
        self.pending_tokens = 0  # uncached prompt tokens of requests without a first token
        self.resident_tokens = 0  # prompt tokens of live sequences
        self._pending: dict[Reservation, Features] = {}
        self._work = NO_WORK  # of all pending requests
        self._head: Features | None = NO_WORK  # of the oldest pending requests; None: stale
        self.hidden_requests = 0  # pending ones with a hidden first token
        self._sample = OpenSample()
        self._begun = 0.0  # estimated time at which the engine began with the oldest pending request
        # Speeds for which `_work` and `_head` were priced; valid until the pending work changes, which for most
        # endpoints is after the next decision. None: stale.
        self._priced_at: Features | None = None
        self._work_s = self._head_s = 0.0
        self._oldest_s = math.inf  # the oldest pending request, if it is hidden
        self.live: LiveBlocks | None = None  # blocks of what is in flight; None: not counted
        self.engine: EngineState | None = None  # of the latest scrape, whatever its age
        self._busy_at = 0.0  # when work began to be pending
        self._shown_at = 0.0  # time of the latest first token, or of the latest request that left before its own
        self._prefilled = NO_WORK  # sum of the work whose first token came, while there is a watch
        self.watch: LoadWatch | None = None
        self.kept_since: float | None = None  # when the session came for which room is kept in the engine's memory
        #: Others' load on the same endpoint, included in this one's figures; None: there are no others.
        self.remote_load: RemoteLoad | None = None

    @property
    def own_in_flight(self) -> int:
        """Requests in flight that were counted in here."""
        return self.in_flight if self.remote_load is None else self.in_flight - self.remote_load.in_flight

    @property
    def pending_requests(self) -> int:
        """Requests without a first token."""
        own = len(self._pending)
        return own if self.remote_load is None else own + round(self.remote_load.pending[0])

    def keep_room(self, since: float | None) -> None:
        """Keep room in the engine's memory for a session that came then; None: keep none."""
        self.kept_since = since
        if self.watch is not None:
            self.watch.load_changed()

    def reserve(
        self,
        uncached_tokens: int,
        cached_tokens: int,
        now: float,
        *,
        onboarding_s: float = 0.0,
        lower: LowerTokens = (),
        hidden: bool = False,
        known: bool = True,
        blocks: Sequence[int] = (),
    ) -> Reservation:
        """Count a request in, in the same step as the pick. `hidden`: its first token will not be seen; `known`: as of
        Reservation."""
        # features_of, written out for every placement
        work = (1.0, uncached_tokens, uncached_tokens * (cached_tokens + uncached_tokens * 0.5), onboarding_s)
        reservation = Reservation(uncached_tokens, cached_tokens, now, work, lower, hidden, known)
        if self.live is not None:
            self.live.add(blocks)
            reservation.live = self.live, blocks
        self.in_flight += 1
        self.pending_tokens += uncached_tokens
        self.resident_tokens += uncached_tokens + cached_tokens
        self.hidden_requests += hidden
        pending = self._pending
        head = self._head
        if not pending and self.remote_load is not None:
            _close_sample(self, now)  # left open because others' first tokens are reported late
        if pending:
            self._work = sum_of(self._work, work)
            # the head includes all pending work
            if head is not None and head[1] < HEAD_TOKENS and head[0] < HEAD_REQUESTS:
                self._head = sum_of(head, work)
        else:
            self._begun = self._busy_at = now
            self._work = self._head = work  # not a sum: ends the drift of adding and subtracting floats
            self._sample.begin(now if self.remote_load is None else self.remote_load.begin_sample(self._shown_at, now))
        pending[reservation] = work
        self._priced_at = None
        if self.watch is not None:
            self.watch.load_changed()
        return reservation

    def begin(self, reservation: Reservation, split: PromptSplit, now: float) -> None:
        """Start a request at its engine with this split of its prompt: neither its wait before nor the part that was
        cached is work of the engine."""
        before = self._pending.get(reservation)
        if before is None:
            return
        work = features_of(split.uncached_tokens, split.cached_tokens, split.onboarding_s)
        self.pending_tokens += split.uncached_tokens - reservation.uncached_tokens
        self.resident_tokens -= reservation.uncached_tokens + reservation.cached_tokens
        self.resident_tokens += split.uncached_tokens + split.cached_tokens
        reservation.uncached_tokens, reservation.cached_tokens, reservation.lower, _ = split
        self._pending[reservation] = reservation.features = work
        self._work = sum_of(difference(self._work, before), work)
        self._head = self._priced_at = None
        if len(self._pending) == 1:
            self._work = work
            self._begun = now
            self._busy_at = now
            self._sample.begin(now)
        if self.watch is not None:
            self.watch.load_changed()

    def first_token(self, reservation: Reservation, now: float) -> None:
        """End this request's prefill; a hidden one ended at an unknown time before."""
        if self.hidden_requests and reservation in self._pending:  # those placed before this one are prefilled
            while (oldest := next(iter(self._pending))) is not reservation and oldest.hidden:
                self._presume(oldest)
        if reservation.hidden:
            self._void(reservation, now)
            return
        if reservation not in self._pending:
            return
        reservation.first_token_at = now
        if not (reservation.known and (reservation.uncached_tokens or reservation.cached_tokens)):
            self._void(reservation, now)
            return
        work = self._settle(reservation)
        assert work is not None
        if self._sample.is_over(now):
            _close_sample(self, now)
        self._sample.join(work, reservation.lower, now)
        self._begun = self._shown_at = now
        if not self._pending and self.remote_load is None:
            _close_sample(self, now)

    def release(self, reservation: Reservation, now: float) -> None:
        """Count a request out: finished, failed or cancelled. Idempotent."""
        if reservation.released:
            return
        reservation.released = True
        if reservation in self._pending:
            self._void(reservation, now)
        self.in_flight -= 1
        if reservation.live is not None:
            live, blocks = reservation.live
            live.remove(blocks)
        self.resident_tokens -= reservation.uncached_tokens + reservation.cached_tokens
        if self.watch is not None:
            self.watch.load_changed()

    def wait_s(self, seconds: Features, slowness: float, now: float) -> float:
        """Until the engine would begin with a request placed now: pending work less what is done of the running step.

        `seconds` is the pool's time for one unit of each feature, `slowness` this endpoint's factor on it. Hidden
        requests whose time has passed are left out, and stay in the ledger.
        """
        elsewhere = self.remote_load
        if not self._pending and (elsewhere is None or not elsewhere.pending[0]):
            return 0.0
        if self._priced_at is not seconds:
            self._priced_at = seconds
            self._oldest_s = _hidden_s(self, seconds) if self.hidden_requests else math.inf
            a, b, c, d = seconds  # not seconds_of: this runs for every endpoint of every pick
            if elsewhere is None or not elsewhere.pending[0]:
                work = self._work
                head = self._head or _head_of_own(self)
            else:
                work = sum_of(self._work, elsewhere.pending) if self._pending else elsewhere.pending
                head = elsewhere.head_of_all(_line(self))
            p, q, r, s = work
            self._work_s = self._head_s = p * a + q * b + r * c + s * d
            if head is not work:
                p, q, r, s = head
                self._head_s = p * a + q * b + r * c + s * d
        begun = self._begun
        if self.hidden_requests and now >= begun + slowness * self._oldest_s:  # else none is over yet
            return self.backlog(seconds, slowness, now).wait_s(seconds, slowness)
        if elsewhere is not None:
            begun = _begun_of_all(self, elsewhere, begun if self._pending else None)
        progress = MAX_PROGRESS * slowness * self._head_s
        elapsed = now - begun
        if elapsed < progress:
            progress = elapsed if elapsed > 0.0 else 0.0
        elif elapsed > OVERDUE * slowness * self._head_s:
            progress = 0.0
        wait = slowness * self._work_s - progress
        return wait if wait > 0.0 else 0.0

    def backlog(self, seconds: Features | None, slowness: float, now: float) -> Backlog:
        """Return the pending work without the hidden requests that are over by these speeds; with None without speeds
        all."""
        work, begun, over = _left(self, seconds, slowness, now)
        elsewhere = self.remote_load
        if elsewhere is not None and elsewhere.pending[0]:
            head = elsewhere.head_of_all(islice(_line(self), over, None))
            begun = _begun_of_all(self, elsewhere, None if work is NO_WORK else begun)
            return Backlog(sum_of(work, elsewhere.pending), head, now - begun)
        if work is NO_WORK:
            return IDLE
        head = head_of(islice(self._pending.values(), over, None)) if over else _head_of_own(self)
        if elsewhere is not None:
            begun = _begun_of_all(self, elsewhere, begun)
        return Backlog(work, head, now - begun)

    def reprice(self) -> None:
        """As of SharedLoad."""
        self._priced_at = None

    def advance(self, seconds: Features, slowness: float, now: float) -> None:
        """Take out the hidden requests that are due: engines prefill in order of arrival, so the oldest one is when its
        own time has passed since the engine began with it. For the cluster alone, before a request is placed."""
        if self._priced_at is seconds and now < self._begun + slowness * self._oldest_s:
            return
        while self.hidden_requests:
            due_at = self._begun + slowness * _hidden_s(self, seconds)
            if now < due_at:
                return
            self._begun = due_at
            self._presume(next(iter(self._pending)))

    def _void(self, reservation: Reservation, now: float) -> None:
        """Take a request out whose prefill teaches nothing, and with it the open sample."""
        if self._settle(reservation) is not None:
            self._sample.begin(now)
            self._begun = self._shown_at = now
            if self.remote_load is not None:
                self.remote_load.take_prefilled(now)

    def _presume(self, hidden: Reservation) -> None:
        work = self._settle(hidden)
        assert work is not None
        if not (hidden.known and (hidden.uncached_tokens or hidden.cached_tokens)):
            self._sample.doubt()
        else:
            self._sample.presume(work)

    def _settle(self, reservation: Reservation) -> Features | None:
        """Take a request out of the pending ones; None when it is none."""
        work = self._pending.pop(reservation, None)
        if work is not None:
            self.hidden_requests -= reservation.hidden
            self.pending_tokens -= reservation.uncached_tokens
            self._head = self._priced_at = None
            if len(self._pending) == 1:  # exactly the remainder, without a new sum
                (self._work,) = self._pending.values()
                self._head = self._work
            elif self._pending:
                self._work = difference(self._work, work)
            else:
                self._work = NO_WORK
            if self.watch is not None:
                self._prefilled = sum_of(self._prefilled, work)
                self.watch.load_changed()
        return work


def count_live_blocks(load: EndpointLoad, wanted: bool) -> None:
    """Start or stop counting live blocks; requests already in flight are never counted."""
    if wanted != (load.live is not None):
        load.live = LiveBlocks() if wanted else None


def own_pending_tokens(load: EndpointLoad) -> int:
    """Return the uncached prompt tokens without a first token, of the requests counted here."""
    return load.pending_tokens if load.remote_load is None else sum(one.uncached_tokens for one in load._pending)


def row_of(load: EndpointLoad, now: float) -> LoadRow:
    """Return the row for other routers."""
    others = load.remote_load
    pending = load._work if load._pending else NO_WORK
    resident = load.resident_tokens if others is None else load.resident_tokens - others.resident_tokens
    busy_s = now - load._busy_at
    shown_s = now - load._shown_at
    head = list_head(_line(load), now)
    kept_s = -1.0 if load.kept_since is None else now - load.kept_since
    return LoadRow(load.own_in_flight, resident, pending, busy_s, shown_s, load._prefilled, head=head, kept_s=kept_s)


def _head_of_own(load: EndpointLoad) -> Features:
    """Of the pending work, what the engine is at once at work on."""
    head = load._head
    if head is None:
        head = load._head = head_of(load._pending.values())
    return head


def own_work(load: EndpointLoad, seconds: Features, slowness: float, now: float) -> Features:
    """Return the pending work of the requests counted here."""
    return _left(load, seconds, slowness, now)[0]


def _left(load: EndpointLoad, seconds: Features | None, slowness: float, now: float) -> tuple[Features, float, int]:
    """Return the same, when the engine began with the oldest of them, and how many before it are hidden
    and over."""
    pending = load._pending
    work = load._work
    begun = load._begun
    over = 0
    if load.hidden_requests and seconds is not None:
        for reservation, own in pending.items():
            due_at = begun + slowness * seconds_of(own, seconds)
            if not reservation.hidden or now < due_at:
                break
            begun = due_at
            work = difference(work, own)
            over = over + 1
    return (NO_WORK if over == len(pending) else work), begun, over


def _line(load: EndpointLoad) -> Iterator[tuple[float, Features]]:
    """Our own pending work, the oldest first, with when it was placed."""
    return ((reservation.started_at, work) for reservation, work in load._pending.items())


def _begun_of_all(load: EndpointLoad, elsewhere: RemoteLoad, own: float | None) -> float:
    """When the engine began with the oldest of all that is pending; `own`: with ours, None where there is none."""
    if own is None:
        own = elsewhere.busy_at
    elif elsewhere.pending[0] and own <= load._busy_at:
        own = min(own, elsewhere.busy_at)
    return max(own, load._shown_at, elsewhere.shown_at)


def _hidden_s(load: EndpointLoad, seconds: Features) -> float:
    """Return the prefill seconds of the oldest pending request if it is hidden; infinity if it is not, or there is
    none."""
    for oldest, work in load._pending.items():
        return seconds_of(work, seconds) if oldest.hidden else math.inf
    return math.inf


def _close_sample(load: EndpointLoad, now: float) -> None:
    sample = load._sample.close()
    if sample is None:
        return
    work, busy_s, lower = sample
    if load.remote_load is not None:
        work = sum_of(work, load.remote_load.take_prefilled(load._sample.ended_at + GROUP_GAP_S))
    if load.on_sample is not None:
        load.on_sample(work, busy_s, now, lower=lower)
        if load.watch is not None:
            load.watch.sampled(work, busy_s, scraped=False)
