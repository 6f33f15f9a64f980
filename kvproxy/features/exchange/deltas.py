"""Deltas: one process's changes as sent to its peers, a struct a kind. Times are ages, never dates: peers share no
clock."""

from __future__ import annotations

import msgspec

from kvproxy.cache.clients.engine_metrics import EngineMetrics
from kvproxy.cluster.prober import ProbeOutcome
from kvproxy.cluster.routing.remote_load import LoadRow
from kvproxy.cluster.routing.work import Features, Finite


class _Delta(msgspec.Struct, array_like=True, frozen=True, gc=False):
    pass


class Routed(_Delta, tag=1, frozen=True):
    """A request goes to an endpoint; `number` names it until it is settled. `hashes` are its text blocks (u64),
    `tokens` those of its prompt, `session` and `parent` as of its facts."""

    cluster: str
    endpoint: str
    number: int
    hashes: bytes
    tokens: int = 0
    session: int = 0
    parent: int = 0


class Settled(_Delta, tag=2, frozen=True):
    """It is over. `reused`: blocks that the engine reused, where capacity is learned from it; `denied`: the engine had
    only so many of those it was estimated to hold; -1: nothing of the kind. `ends` and `calls_tool` as of
    LocalIndexes.settle_entry."""

    cluster: str
    number: int
    prefilled: bool
    lost: bool
    reused: int
    denied: int
    ends: bool = False
    calls_tool: bool = True


class Moved(_Delta, tag=15, frozen=True):
    """The same request goes on at another endpoint; the earlier one has `kept` its prompt, or never computed it."""

    cluster: str
    endpoint: str
    number: int
    kept: bool


class Entered(_Delta, tag=3, frozen=True):
    """An endpoint served a prompt that was routed there by another than a proxy."""

    cluster: str
    endpoint: str
    hashes: bytes


class Started(_Delta, tag=4, frozen=True):
    """An engine's process began at this time, by its own clock."""

    cluster: str
    endpoint: str
    started_at: Finite


class SessionServed(_Delta, tag=5, frozen=True):
    """Where a session (0: none) or response (0: none) was served last; no endpoint: the session is over."""

    cluster: str
    session: int
    response: int
    endpoint: str
    age_s: Finite = 0.0
    prompt_tokens: int = 0
    tokens: int = 0
    keys: bytes = b""
    root: bytes = b""


class Counted(_Delta, tag=6, frozen=True):
    """An engine counted a prompt's tokens. `key`: of its last message."""

    model: str
    key: int
    prompt_bytes: int
    prompt_tokens: int


class Sample(_Delta, tag=7, frozen=True):
    """Sample of an engine: `work` done in these busy seconds."""

    cluster: str
    endpoint: str
    work: Features
    busy_s: Finite
    scraped: bool


class Used(_Delta, tag=8, frozen=True):
    """Message prefixes of a request."""

    keys: bytes
    model: str
    cache_salt: str
    instance: str
    session: int


class Acted(_Delta, tag=9, frozen=True):
    """Something was done at an LMCache instance; key 0: to all it holds. `tokens` (u32) where they are not too many."""

    kind: str
    instance: str
    key: int
    model: str
    cache_salt: str
    tokens: bytes = b""
    age_s: Finite = 0.0


class Spent(_Delta, tag=10, frozen=True):
    """Charged to a rate limit's bucket; `at_least`: not a charge, but all that is missing there. `limit`: the name of
    its filter."""

    limit: str
    key: str
    kind: str
    amount: float
    at_least: bool = False


class Retried(_Delta, tag=11, frozen=True):
    """Requests that began, and retries that were made."""

    requests: int
    retries: int


class EngineRead(_Delta, tag=13, frozen=True):
    """Reading of an engine's metrics, just taken."""

    cluster: str
    engine: str
    metrics: EngineMetrics


class Probed(_Delta, tag=14, frozen=True):
    """Outcome of a probe of an engine, just made; for workers of the same machine."""

    cluster: str
    engine: str
    outcome: ProbeOutcome


class Drained(_Delta, tag=12, frozen=True):
    """An operator drains an endpoint, or does so no more."""

    cluster: str
    endpoint: str
    draining: bool


Delta = (
    Routed
    | Settled
    | Moved
    | Entered
    | Started
    | SessionServed
    | Counted
    | Sample
    | Used
    | Acted
    | Spent
    | Retried
    | EngineRead
    | Probed
    | Drained
)


class EndpointLoads(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One endpoint's ledger."""

    cluster: str
    endpoint: str
    row: LoadRow
