"""Local changes, as deltas for others: noted on the request path by an append, and sent in batches."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from kvproxy.base.bounded import BoundedMapping
from kvproxy.base.types import EndpointId
from kvproxy.cache.actions.strategies import Action
from kvproxy.cache.overlap.last_served import Served
from kvproxy.cluster.routing.work import Features
from kvproxy.features.exchange import deltas
from kvproxy.features.exchange.bounded_queue import BoundedQueue
from kvproxy.features.exchange.deltas import Delta, EndpointLoads
from kvproxy.features.exchange.shared_state import SharedState
from kvproxy.features.exchange.watches import IndexWatch, LedgerWatch, acted, add_to_digest, as_bytes, session_served
from kvproxy.features.exchange.wire import MAX_BYTES, MAX_DELTAS, MAX_ROWS, Batch, Origin

#: Deltas that wait for the next batch: more than a few milliseconds can bring.
MAX_WAITING_BYTES = 16 * 1024 * 1024
#: Samples of speed sent per heartbeat: a model learns as much from fewer.
MAX_SAMPLES = 64

#: Of the batches that were sent so much is kept.
MAX_SENT_BYTES = 4 * 1024 * 1024

_ROW_BYTES = 150
_AHEAD_BYTES = 48
_DELTA_BYTES = 120
_BATCH_BYTES = 100


class Journal:
    """Of this process. `on_news` is called when there is something to hand out after there was nothing."""

    def __init__(self, origin: Origin, *, on_news: Callable[[], None]) -> None:
        self.origin = origin
        self.seq = self.told = self.digest = 0
        self.dropped = 0  # deltas that found the journal full
        self.open: dict[tuple[str, int], deltas.Routed] = {}  # requests under way
        self.starts: BoundedMapping[tuple[str, str], float] = BoundedMapping(4096)  # of engines, as sent or received
        self.weight = 1.0  # weight of a charge while others cannot be reached
        self._on_news = on_news
        self._waiting: BoundedQueue[Delta] = BoundedQueue(MAX_WAITING_BYTES)
        self._touched: dict[tuple[str, str], LedgerWatch] = {}
        self._ledgers: dict[tuple[str, str], LedgerWatch] = {}
        self._indexes: dict[str, IndexWatch] = {}
        self._spent: dict[tuple[str, str, str], float] = {}
        self._draining: dict[tuple[str, str], bool] = {}
        self._counted = (0, 0)  # of retry budgets, as sent
        self._samples = 0
        self._world = SharedState({})

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def held_bytes(self) -> int:
        """Of what waits."""
        return self._waiting.held_bytes

    def follow(self, world: SharedState) -> None:
        """Watch these objects from now on; endpoints of a cluster are found by `look`."""
        self._world = world
        self._counted = self._budgets()
        if world.state is not None:
            world.state.on_counted = self.counted
        world.watch_engines(self.add)
        if world.actions is not None:
            world.actions.hotness.watch = self.used
        for name, table in world.limits.items():
            table.watch = partial(self.spend, name)
        for name, part in world.clusters.items():
            if (indexes := part.indexes) is not None:
                indexes.state.watch = self._indexes.setdefault(name, IndexWatch(name, self))
                indexes.last_served.watch = partial(self.served, name)
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
            for endpoint, draining in part.drained().items():
                key = (name, str(endpoint))
                if self._draining.get(key, False) is not draining:
                    self._draining[key] = draining
                    self.add(deltas.Drained(name, str(endpoint), draining))
        self._ledgers = present
        self._draining = {key: value for key, value in self._draining.items() if key in present}
        self._count_retries()

    def receive_drain(self, cluster: str, endpoint: str, *, draining: bool) -> None:
        """Note a drain reported by another process, which is not reported again."""
        self._draining[cluster, endpoint] = draining

    def add(self, delta: Delta) -> None:
        """Into the next batch."""
        waiting = self._waiting
        if not waiting and not self._touched:
            self._on_news()
        self.dropped += waiting.append(delta, size_of(delta))

    def touch(self, ledger: LedgerWatch) -> None:
        """Its row belongs into the next batch."""
        if not self._touched and not self._waiting:
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
        while self._waiting or rows:
            said = rows[:MAX_ROWS]
            batch = list[Delta]()
            taken = sum(_ROW_BYTES + _AHEAD_BYTES * len(one.row.head) for one in said)
            while self._waiting and len(batch) < MAX_DELTAS:
                size = self._waiting.next_bytes
                if taken + size > MAX_BYTES and (batch or rows):
                    break
                taken += size
                batch.append(self._count(self._waiting.popleft()))
            self.seq += 1
            yield Batch(self.origin, self.seq, now, batch, said)
            del rows[:MAX_ROWS]

    def _count(self, delta: Delta) -> Delta:
        if isinstance(delta, deltas.Routed | deltas.Entered):
            self.told += 1
            self.digest = add_to_digest(self.digest, delta.hashes)
        return delta

    # watched objects

    def served(self, cluster: str, session: int, response: int, served: Served | None) -> None:
        """As of ServedWatch."""
        if served is None:
            self.add(deltas.SessionServed(cluster, session, response, ""))
        else:
            self.add(session_served(cluster, session, response, served, served.at))

    def counted(self, model: str, keys: Sequence[int], prompt_bytes: int, prompt_tokens: int) -> None:
        """As of CacheState."""
        self.add(deltas.Counted(model, keys[-1] if keys else 0, prompt_bytes, prompt_tokens))

    def used(self, keys: Sequence[int], model: str, cache_salt: str, instance: str, session: int) -> None:
        """As of UseWatch."""
        self.add(deltas.Used(as_bytes(array("Q", keys)), model, cache_salt, instance, session))

    def acted(self, action: Action) -> None:
        """As of Claims."""
        self.add(acted(action))

    def spend(self, limit: str, key: str, kind: str, amount: float) -> float:
        """As of ChargedLimits."""
        if not self._spent and not self._waiting and not self._touched:
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

    def _count_retries(self) -> None:
        before = self._counted
        self._counted = self._budgets()
        requests = self._counted[0] - before[0]
        retries = self._counted[1] - before[1]
        if requests or retries:
            self.add(deltas.Retried(requests, retries))

    def _budgets(self) -> tuple[int, int]:
        budgets = self._world.budgets.values()
        return sum(one.began for one in budgets), sum(one.made for one in budgets)


class SentBatches:
    """The latest batches, to be sent again."""

    def __init__(self) -> None:
        self._kept: BoundedQueue[tuple[int, bytes]] = BoundedQueue(MAX_SENT_BYTES)

    @property
    def held_bytes(self) -> int:
        """Of all that are kept."""
        return self._kept.held_bytes

    @property
    def oldest(self) -> int | None:
        """The first that is kept."""
        return next((seq for seq, _ in self._kept), None)

    def keep(self, seq: int, payload: bytes) -> None:
        """Keep a batch that was just sent."""
        self._kept.append((seq, payload), len(payload) + _BATCH_BYTES)

    def since(self, first: int) -> list[bytes] | None:
        """All from that one on; None: that one is gone."""
        if (oldest := self.oldest) is None or oldest > first:
            return None
        return [payload for seq, payload in self._kept if seq >= first]


def in_parts(routed: Iterable[deltas.Routed]) -> list[list[deltas.Routed]]:
    """In lists that fit into a message each, beside loads."""
    parts: list[list[deltas.Routed]] = []
    room = 0
    for one in routed:
        size = 100 + len(one.hashes)
        if size > room:
            parts.append([])
            room = MAX_BYTES
        parts[-1].append(one)
        room -= size
    return parts


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
