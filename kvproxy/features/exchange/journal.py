"""Local changes, as deltas for others: noted on the request path by an append, and sent in batches."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial

import msgspec

from kvproxy.base.bounded import BoundedMapping
from kvproxy.base.types import EndpointId
from kvproxy.cache.indexes.endpoint_lru import SpeculativeEntry
from kvproxy.cache.indexes.heat import Run
from kvproxy.cache.indexes.radix import PrefixCursor
from kvproxy.cache.overlap.last_served import Served
from kvproxy.cache.prefix.hashing import little_endian
from kvproxy.cache.store import Action
from kvproxy.cluster.routing.load import EndpointLoad, row_of
from kvproxy.cluster.routing.policy import OverlapFacts
from kvproxy.cluster.routing.work import Features
from kvproxy.features.exchange import deltas
from kvproxy.features.exchange.bounded_queue import BoundedQueue
from kvproxy.features.exchange.deltas import Delta, EndpointLoads
from kvproxy.features.exchange.shared_state import SharedState
from kvproxy.features.exchange.wire import MAX_BLOCKS, MAX_BYTES, MAX_DELTAS, MAX_ROWS, Batch, Origin

AddDelta = Callable[[Delta], None]

#: Tokens of a prefix sent along with an action on it.
MAX_TOKENS = 8192


def as_bytes(numbers: array[int], limit: int = MAX_BLOCKS) -> bytes:
    """Numbers on the wire, little-endian, at most so many."""
    return little_endian(numbers if len(numbers) <= limit else numbers[:limit]).tobytes()


def numbers(code: str, data: bytes) -> array[int]:
    """From the wire; what is cut short ends with its last whole number."""
    found = array(code)
    found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return little_endian(found)


class IndexWatch:
    """Watches one cluster's indexes."""

    def __init__(self, cluster: str, notes: Journal) -> None:
        self._cluster = cluster
        self._notes = notes
        self._reused: tuple[SpeculativeEntry, int] | None = None  # about the entry that is settled next
        self._denied: tuple[PrefixCursor[Run], int] | None = None

    def routed(self, entry: SpeculativeEntry, facts: OverlapFacts) -> None:
        """As of IndexWatch."""
        notes = self._notes
        hashes = as_bytes(entry.hashes)
        if hashes:
            endpoint = str(entry.endpoint)
            tokens = facts.prompt_tokens
            delta = deltas.Routed(self._cluster, endpoint, entry.number, hashes, tokens, facts.session, facts.parent)
            notes.open[self._cluster, entry.number] = delta
            notes.add(delta)

    def moved(self, entry: SpeculativeEntry, *, kept: bool) -> None:
        """As of IndexWatch."""
        notes = self._notes
        key = self._cluster, entry.number
        if (earlier := notes.open.get(key)) is not None:
            endpoint = str(entry.endpoint)
            notes.open[key] = msgspec.structs.replace(earlier, endpoint=endpoint)
            notes.add(deltas.Moved(self._cluster, endpoint, entry.number, kept))

    def reused(self, entry: SpeculativeEntry, blocks: int) -> None:
        """As of IndexWatch."""
        self._reused = entry, blocks

    def contradicted(self, endpoint: EndpointId, cursor: PrefixCursor[Run], blocks: int) -> None:
        """As of IndexWatch."""
        self._denied = cursor, blocks

    def settled(self, entry: SpeculativeEntry, *, prefilled: bool, lost: bool, ends: bool, calls_tool: bool) -> None:
        """As of IndexWatch."""
        (reused, denied), self._reused, self._denied = (self._reused, self._denied), None, None
        if self._notes.open.pop((self._cluster, entry.number), None) is None:
            return
        reused_blocks = reused[1] if reused is not None and reused[0] is entry else -1
        denied_blocks = denied[1] if denied is not None and denied[0] is entry.cursor else -1
        number = entry.number
        self._notes.add(
            deltas.Settled(self._cluster, number, prefilled, lost, reused_blocks, denied_blocks, ends, calls_tool)
        )

    def entered(self, endpoint: EndpointId, cursor: PrefixCursor[Run]) -> None:
        """As of IndexWatch."""
        hashes = as_bytes(cursor.hashes)
        if hashes:
            self._notes.add(deltas.Entered(self._cluster, str(endpoint), hashes))

    def process_started(self, endpoint: EndpointId, started_at: float) -> None:
        """As of IndexWatch."""
        key = (self._cluster, str(endpoint))
        if self._notes.starts.get(key) != started_at:
            self._notes.starts[key] = started_at
            self._notes.add(deltas.Started(self._cluster, str(endpoint), started_at))


class LedgerWatch:
    """Watches one endpoint's ledger."""

    __slots__ = ("_bound", "_notes", "_routed", "_routed_s", "key", "load")

    def __init__(self, key: tuple[str, str], load: EndpointLoad, notes: Journal) -> None:
        self.key = key
        self.load = load
        self._notes = notes
        self._routed = self._bound = 0
        self._routed_s = 0.0

    def load_changed(self) -> None:
        """As of LoadWatch."""
        self._notes.touch(self)

    def sampled(self, work: Features, busy_s: float, *, scraped: bool) -> None:
        """As of LoadWatch."""
        self._notes.sampled(*self.key, work, busy_s, scraped=scraped)

    def placed(self, routed_s: float, *, bound: bool) -> None:
        """Note a request that was placed there; it is counted in next."""
        self._routed += 1
        self._routed_s += routed_s
        self._bound += bound

    def told(self, now: float) -> EndpointLoads:
        """Return the ledger as it stands."""
        row = row_of(self.load, now)
        row = msgspec.structs.replace(row, routed_s=self._routed_s, routed=self._routed, bound=self._bound)
        return EndpointLoads(*self.key, row)


def session_served(cluster: str, session: int, response: int, served: Served, now: float) -> deltas.SessionServed:
    """Return what is known of a session or response, on the deltas."""
    age_s = now - served.at
    endpoint = str(served.endpoint)
    keys = as_bytes(served.keys)
    root = as_bytes(served.root)
    return deltas.SessionServed(
        cluster, session, response, endpoint, age_s, served.prompt_tokens, served.tokens, keys, root
    )


def acted(action: Action, age_s: float = 0.0) -> deltas.Acted:
    """Something done, on the deltas."""
    prefix = action.prefix
    if prefix is None:
        return deltas.Acted(action.kind.value, action.instance_id, 0, "", "", b"", age_s)
    tokens = little_endian(prefix.tokens).tobytes() if len(prefix.tokens) <= MAX_TOKENS else b""
    return deltas.Acted(
        action.kind.value, action.instance_id, prefix.key, prefix.model, prefix.cache_salt, tokens, age_s
    )


#: Deltas that wait for the next batch: more than a few milliseconds can bring.
MAX_WAITING_BYTES = 16 * 1024 * 1024
#: Samples of speed sent per heartbeat: a model learns as much from fewer.
MAX_SAMPLES = 64
_ROW_BYTES = 150
_AHEAD_BYTES = 48
_DELTA_BYTES = 120


class Journal:
    """Of this process. `on_news` is called when there is something to hand out after there was nothing."""

    def __init__(self, origin: Origin, *, on_news: Callable[[], None]) -> None:
        self.origin = origin
        self.seq = self.told = 0
        self.dropped = 0  # deltas that found the journal full
        self.open: dict[tuple[str, int], deltas.Routed] = {}  # requests under way
        self.drains = Drains()
        self.starts: BoundedMapping[tuple[str, str], float] = BoundedMapping(4096)  # of engines, as sent or received
        self.weight = 1.0  # weight of a charge while others cannot be reached
        self._on_news = on_news
        #: Until they are taken for a batch.
        self.waiting: BoundedQueue[Delta] = BoundedQueue(MAX_WAITING_BYTES)
        self._touched: dict[tuple[str, str], LedgerWatch] = {}
        self._ledgers: dict[tuple[str, str], LedgerWatch] = {}
        self._indexes: dict[str, IndexWatch] = {}
        self._spent: dict[tuple[str, str, str], float] = {}
        self._counted = (0, 0)  # of retry budgets, as sent
        self._samples = 0
        self._world = SharedState({})

    def follow(self, world: SharedState) -> None:
        """Watch these objects from now on; endpoints of a cluster are found by `look`."""
        self._world = world
        self._counted = _count_budgets(world)
        if world.state is not None:
            world.state.on_counted = partial(_note_count, self.add)
        world.watch_engines(self.add)
        if world.hotness is not None:
            world.hotness.watch = partial(_note_use, self.add)
        for name, table in world.limits.items():
            table.watch = partial(self.spend, name)
        for name, part in world.clusters.items():
            if (indexes := part.indexes) is not None:
                indexes.state.watch = self._indexes.setdefault(name, IndexWatch(name, self))
                indexes.last_served.watch = partial(_note_served, self.add, name)
        self.look()

    def look(self) -> None:
        """Watch new endpoints, and report changes that have no hook."""
        self._samples = 0
        present: dict[tuple[str, str], LedgerWatch] = {}
        for name, part in self._world.clusters.items():
            part.policy.on_placed = partial(self._placed, name)
            for endpoint, load in part.loads():
                key = (name, str(endpoint))
                known = self._ledgers.get(key)
                if known is None or known.load is not load:
                    known = load.watch = LedgerWatch(key, load, self)
                    known.load_changed()
                present[key] = known
            for delta in self.drains.find_changes(name, part.drained()):
                self.add(delta)
        self._ledgers = present
        self.drains.keep_only(present)
        before = self._counted
        self._counted = _count_budgets(self._world)
        began, made = (now - then for now, then in zip(self._counted, before, strict=True))
        if began or made:
            self.add(deltas.Retried(began, made))

    def add(self, delta: Delta) -> None:
        """Into the next batch."""
        waiting = self.waiting
        if not waiting and not self._touched:
            self._on_news()
        self.dropped += waiting.append(delta, size_of(delta))

    def touch(self, ledger: LedgerWatch) -> None:
        """Its row belongs into the next batch."""
        if not self._touched and not self.waiting:
            self._on_news()
        self._touched[ledger.key] = ledger

    def rows(self, now: float) -> list[EndpointLoads]:
        """All ledgers."""
        return [ledger.told(now) for ledger in self._ledgers.values()]

    def take_batches(self, now: float) -> Iterator[Batch]:
        """Take all waiting deltas, in messages of a size that every link carries."""
        for (limit, key, kind), amount in self._spent.items():
            self.add(deltas.Spent(limit, key, kind, amount))
        self._spent.clear()
        rows = [ledger.told(now) for ledger in self._touched.values()]
        self._touched.clear()
        while self.waiting or rows:
            said = rows[:MAX_ROWS]
            batch = list[Delta]()
            taken = sum(_ROW_BYTES + _AHEAD_BYTES * len(one.row.head) for one in said)
            while self.waiting and len(batch) < MAX_DELTAS:
                size = self.waiting.next_bytes
                if taken + size > MAX_BYTES and (batch or rows):
                    break
                taken += size
                delta = self.waiting.popleft()
                batch.append(delta)
                if isinstance(delta, deltas.Routed | deltas.Entered):
                    self.told += 1
            self.seq += 1
            yield Batch(self.origin, self.seq, now, batch, said)
            del rows[:MAX_ROWS]

    def spend(self, limit: str, key: str, kind: str, amount: float) -> float:
        """As of ChargedLimits."""
        if not self._spent and not self.waiting and not self._touched:
            self._on_news()
        where = (limit, key, kind)
        self._spent[where] = self._spent.get(where, 0.0) + amount
        return amount * self.weight

    def sampled(self, cluster: str, endpoint: str, work: Features, busy_s: float, *, scraped: bool) -> None:
        """As of LoadWatch."""
        self._samples += 1
        if self._samples <= MAX_SAMPLES:
            self.add(deltas.Sample(cluster, endpoint, work, busy_s, scraped))

    def _placed(self, cluster: str, endpoint: EndpointId, routed_s: float, bound: bool) -> None:
        ledger = self._ledgers.get((cluster, str(endpoint)))
        if ledger is not None:
            ledger.placed(routed_s, bound=bound)


class Drains:
    """Drains of endpoints by operators, as sent or received."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], bool] = {}

    def find_changes(self, cluster: str, drained: Mapping[EndpointId, bool]) -> Iterator[deltas.Drained]:
        """Yield what was changed here."""
        for endpoint, draining in drained.items():
            key = (cluster, str(endpoint))
            if self._known.get(key, False) is not draining:
                self._known[key] = draining
                yield deltas.Drained(cluster, str(endpoint), draining)

    def receive(self, cluster: str, endpoint: str, *, draining: bool, own: bool | None) -> bool:
        """Note a drain reported by another process, which is not reported again. False: the `own` state is by a later
        order, which is about to be reported; None: the endpoint is not here."""
        if own not in (None, self._known.get((cluster, endpoint), False)):
            return False
        self._known[cluster, endpoint] = draining
        return True

    def keep_only(self, present: Container[tuple[str, str]]) -> None:
        """Forget endpoints that left."""
        self._known = {key: value for key, value in self._known.items() if key in present}


def _count_budgets(world: SharedState) -> tuple[int, int]:
    """Return the requests and retries of all budgets."""
    budgets = world.budgets.values()
    return sum(one.began for one in budgets), sum(one.made for one in budgets)


def _note_served(
    add: Callable[[Delta], None], cluster: str, session: int, response: int, served: Served | None
) -> None:
    """As of ServedWatch."""
    if served is None:
        add(deltas.SessionServed(cluster, session, response, ""))
    else:
        add(session_served(cluster, session, response, served, served.at))


def _note_count(add: AddDelta, model: str, keys: Sequence[int], prompt_bytes: int, prompt_tokens: int) -> None:
    """As of CacheState."""
    add(deltas.Counted(model, keys[-1] if keys else 0, prompt_bytes, prompt_tokens))


def _note_use(add: AddDelta, keys: Sequence[int], model: str, cache_salt: str, instance: str, session: int) -> None:
    """As of UseWatch."""
    add(deltas.Used(as_bytes(array("Q", keys)), model, cache_salt, instance, session))


def size_of(delta: Delta) -> int:
    """About how many bytes it takes."""
    if isinstance(delta, deltas.Routed | deltas.Entered):
        return _DELTA_BYTES + len(delta.hashes)
    if isinstance(delta, deltas.SessionServed):
        return _DELTA_BYTES + len(delta.keys) + len(delta.root)
    if isinstance(delta, deltas.Used):
        return _DELTA_BYTES + len(delta.keys)
    if isinstance(delta, deltas.EngineRead):
        return 5 * _DELTA_BYTES
    return _DELTA_BYTES + (len(delta.tokens) if isinstance(delta, deltas.Acted) else 0)
