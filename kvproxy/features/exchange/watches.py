"""Hooks into indexes and ledgers that feed the journal."""

from __future__ import annotations

from array import array
from collections.abc import MutableMapping
from typing import Protocol

import msgspec

from kvproxy.base.types import EndpointId
from kvproxy.cache.actions.strategies import Action
from kvproxy.cache.indexes.endpoint_lru import SpeculativeEntry
from kvproxy.cache.indexes.heat import Run
from kvproxy.cache.indexes.radix import PrefixCursor
from kvproxy.cache.overlap.last_served import Served
from kvproxy.cache.prefix.hashing import little_endian
from kvproxy.cluster.routing.load import EndpointLoad
from kvproxy.cluster.routing.policy import OverlapFacts
from kvproxy.cluster.routing.work import Features
from kvproxy.features.exchange import deltas
from kvproxy.features.exchange.deltas import Delta, EndpointLoads
from kvproxy.features.exchange.wire import MAX_BLOCKS

#: Tokens of a prefix sent along with an action on it.
MAX_TOKENS = 8192


class Notes(Protocol):
    """The journal, as its watches see it."""

    open: dict[tuple[str, int], deltas.Routed]

    @property
    def starts(self) -> MutableMapping[tuple[str, str], float]: ...

    def add(self, delta: Delta) -> None: ...

    def touch(self, ledger: LedgerWatch) -> None: ...

    def sampled(self, cluster: str, endpoint: str, work: Features, busy_s: float, *, scraped: bool) -> None: ...


def as_bytes(numbers: array[int], limit: int = MAX_BLOCKS) -> bytes:
    """Numbers on the wire, little-endian, at most so many."""
    return little_endian(numbers if len(numbers) <= limit else numbers[:limit]).tobytes()


def numbers(code: str, data: bytes) -> array[int]:
    """From the wire; what is cut short ends with its last whole number."""
    found = array(code)
    found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return little_endian(found)


def add_to_digest(digest: int, hashes: bytes) -> int:
    """Return the digest of the sent prompts, with one more."""
    return (digest + int.from_bytes(hashes[-8:], "little")) & ((1 << 64) - 1)


class IndexWatch:
    """Watches one cluster's indexes."""

    def __init__(self, cluster: str, notes: Notes) -> None:
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

    def reused(self, entry: SpeculativeEntry, blocks: int) -> None:
        """As of IndexWatch."""
        self._reused = entry, blocks

    def contradicted(self, endpoint: EndpointId, cursor: PrefixCursor[Run], blocks: int) -> None:
        """As of IndexWatch."""
        self._denied = cursor, blocks

    def settled(self, entry: SpeculativeEntry, *, prefilled: bool, lost: bool) -> None:
        """As of IndexWatch."""
        (reused, denied), self._reused, self._denied = (self._reused, self._denied), None, None
        if self._notes.open.pop((self._cluster, entry.number), None) is None:
            return
        reused_blocks = reused[1] if reused is not None and reused[0] is entry else -1
        denied_blocks = denied[1] if denied is not None and denied[0] is entry.cursor else -1
        self._notes.add(deltas.Settled(self._cluster, entry.number, prefilled, lost, reused_blocks, denied_blocks))

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

    def __init__(self, key: tuple[str, str], load: EndpointLoad, notes: Notes) -> None:
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
        row = self.load.row(now)
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
