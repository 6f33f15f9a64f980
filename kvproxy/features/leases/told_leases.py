"""Conversations that are waited for and the leases on their prompts, as processes tell each other of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

from kvproxy.base.types import EndpointId
from kvproxy.cache.actions.hotness import Hotness, KnownPrefix
from kvproxy.features.exchange.deltas import Awaited, Delta, Leased, LeaseOver, Returned
from kvproxy.features.exchange.world import World
from kvproxy.features.leases.conversations import Waiting
from kvproxy.features.leases.leases import Lease, LeaseBook

KINDS: Final = Awaited, Returned, Leased, LeaseOver


class TellLeases:
    """As of LeaseNews. Times are told as ages: what is told just now is so old."""

    def __init__(self, add: Callable[[Delta], None]) -> None:
        self._add = add

    def waits(self, waiting: Waiting) -> None:
        self._add(awaited(waiting, waiting.ended_at))

    def returned(self, key: int) -> None:
        self._add(Returned(key))

    def leased(self, lease: Lease) -> None:
        self._add(leased(lease, lease.used_at))

    def over(self, key: int) -> None:
        self._add(LeaseOver(key))


def awaited(waiting: Waiting, now: float) -> Awaited:
    """Return a conversation, on the deltas."""
    (client, tool), age_s = waiting.kind, now - waiting.ended_at
    return Awaited(
        waiting.key,
        client,
        tool,
        waiting.cluster,
        str(waiting.endpoint),
        waiting.tenant,
        waiting.session,
        waiting.asked_s,
        age_s,
    )


def leased(lease: Lease, now: float) -> Leased:
    """Return a lease, on the deltas."""
    of = awaited(lease.of, now)
    age_s = now - lease.made_at
    left_s = lease.until - now
    return Leased(of, lease.instance, lease.lever, lease.why, lease.tokens, lease.held, age_s, left_s)


def told_of(book: LeaseBook, now: float) -> Iterator[Delta]:
    """All of it, for a process that is new."""
    for waiting in [*book.waiting]:
        yield awaited(waiting, now)
    for lease in [one for one in book.leases.values() if one.returned_at is None]:
        yield leased(lease, now)


def hear_lease(delta: Awaited | Returned | Leased | LeaseOver, world: World, now: float) -> None:
    """A peer's word; nothing where leases are switched off."""
    if world.actions is None or world.actions.leasing is None:
        return
    book = world.actions.leasing.book
    match delta:
        case Awaited():
            book.waiting.add(_waiting(delta, now))
        case Returned():
            book.note_return((delta.key,), now, told=True)
        case Leased():
            book.adopt(_lease(delta, world.actions.hotness, now))
        case LeaseOver() if (lease := book.leases.get(delta.key)) is not None:
            book.release(lease, told=True)


def end_waiting(session: int, world: World) -> None:
    """The session is over: nothing more comes of it. Of leases on it those words come that end them."""
    if world.actions is not None and world.actions.leasing is not None:
        world.actions.leasing.book.waiting.end_session(session)


def _waiting(said: Awaited, now: float) -> Waiting:
    kind = (said.client, said.tool)
    endpoint = EndpointId(said.endpoint)
    return Waiting(said.key, kind, now - said.age_s, endpoint, said.cluster, said.tenant, said.session, said.asked_s)


def _lease(said: Leased, hotness: Hotness, now: float) -> Lease:
    of = _waiting(said.of, now)
    made_at = now - said.age_s
    prefix = hotness.find_prefix(of.key) or KnownPrefix(of.key, "", "", deque(maxlen=1), of.key)
    return Lease(
        of,
        prefix,
        said.instance,
        said.lever,
        said.why,
        made_at,
        now + said.left_s,
        now,
        said.held,
        told_tokens=max(0, said.tokens),
    )
