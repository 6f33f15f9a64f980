"""Claims of actions to be done once: each has an owner among the living proxies, who grants it for a while."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from xxhash import xxh3_64_intdigest

from kvproxy.base.bounded import BoundedMapping
from kvproxy.base.types import Clock
from kvproxy.cache.store import Action
from kvproxy.features.exchange.journal import Journal, acted
from kvproxy.features.exchange.peers import Peers
from kvproxy.features.exchange.stores import StoreKeys
from kvproxy.features.exchange.wire import ClaimAnswered, ClaimAsked, Message, Origin

#: An owner that does not answer for this long grants no claim: the action is decided on again later.
ANSWER_S = 0.5
MAX_CLAIMS = 10_000


class ClaimTable:
    """Claims granted by their owner. An expired one may be granted to another; its holder may renew it."""

    def __init__(self, *, clock: Clock) -> None:
        self._clock = clock
        self._granted: BoundedMapping[str, tuple[Origin, float]] = BoundedMapping(MAX_CLAIMS)

    def __len__(self) -> int:
        return len(self._granted)

    def grant(self, what: str, ttl_s: float, to: Origin) -> bool:
        """Grant a claim for `ttl_s` and return True, unless another proxy holds it."""
        now = self._clock()
        granted = self._granted.get(what)
        if granted is not None and granted[0] != to and now < granted[1]:
            return False
        self._granted[what] = (to, now + ttl_s)
        return True


class PeerClaims:
    """Claims by asking the owner: of all that live, itself included, the one whose name goes best with the claim's.
    While proxies disagree on who lives two owners may grant the same, so that it is done twice."""

    def __init__(self, peers: Peers, *, clock: Clock) -> None:
        self.table = ClaimTable(clock=clock)
        self._peers = peers
        self._asked: dict[tuple[Origin, str], asyncio.Future[bool]] = {}

    async def claim(self, what: str, ttl_s: float) -> bool:
        """As of ActionLocks."""
        me = self._peers.origin
        owner = owner_of(what, (me, *(peer.origin for peer in self._peers.living)))
        if owner == me:
            return self.table.grant(what, ttl_s, me)
        answer = self._asked.get((owner, what))
        if answer is None:
            answer = self._asked[owner, what] = asyncio.get_running_loop().create_future()
            self._peers.send_to(owner, ClaimAsked(me, what, ttl_s))
        try:
            async with asyncio.timeout(ANSWER_S):
                return await asyncio.shield(answer)
        except TimeoutError:
            return False
        finally:
            self._asked.pop((owner, what), None)

    def receive(self, message: Message) -> None:
        """Handle a peer's claim, or its answer."""
        if isinstance(message, ClaimAsked):
            granted = self.table.grant(message.what, message.ttl_s, message.origin)
            self._peers.send_to(message.origin, ClaimAnswered(self._peers.origin, message.what, granted))
        elif isinstance(message, ClaimAnswered):
            answer = self._asked.get((message.origin, message.what))
            if answer is not None and not answer.done():
                answer.set_result(message.granted)


class SharedLocks:
    """As of ActionLocks: claims by a key of the store where there is one, else by asking their owners."""

    def __init__(self, claims: PeerClaims, journal: Journal, keys: Callable[[], StoreKeys | None]) -> None:
        self._claims = claims
        self._journal = journal
        self._keys = keys

    async def claim(self, what: str, ttl_s: float) -> bool:
        """As of ActionLocks."""
        keys = self._keys()
        if keys is not None:
            return await keys.claim(what, ttl_s, self._journal.origin)
        return await self._claims.claim(what, ttl_s)

    def acted(self, action: Action) -> None:
        """As of ActionLocks."""
        self._journal.add(acted(action))


def owner_of(what: str, candidates: Iterable[Origin]) -> Origin:
    """Return the owner of a claim, the same at all proxies with the same candidates."""
    return max(candidates, key=lambda one: xxh3_64_intdigest(f"{what} {one} {one.epoch}".encode()))
