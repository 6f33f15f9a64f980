"""Claims of actions to be done once: each has an owner among the living proxies, who grants it for a while."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from xxhash import xxh3_64_intdigest

from kvproxy.base.bounded import BoundedMapping
from kvproxy.base.types import Clock
from kvproxy.cache.store import Action
from kvproxy.features.exchange.journal import Journal, acted
from kvproxy.features.exchange.peers import Peers
from kvproxy.features.exchange.wire import ClaimAnswered, ClaimAsked, Message, Origin

#: An owner that does not answer for this long grants no claim: the action is decided on again later.
ANSWER_S = 0.5
MAX_CLAIMS = 10_000


class PeerClaims:
    """As of ActionLocks. Of all processes that live, this one included, the owner of a claim is the one whose name goes
    best with the claim's. It grants the claim for a while, and its holder may renew it. While processes disagree on
    which live two owners may grant the same, so that it is done twice."""

    def __init__(self, peers: Peers, journal: Journal, *, clock: Clock) -> None:
        self._peers = peers
        self._journal = journal
        self._clock = clock
        self._granted: BoundedMapping[str, tuple[Origin, float]] = BoundedMapping(MAX_CLAIMS)  # to whom, until when
        self._asked: dict[tuple[Origin, str], asyncio.Future[bool]] = {}

    async def claim(self, what: str, ttl_s: float) -> bool:
        """As of ActionLocks."""
        me = self._peers.origin
        owner = owner_of(what, (me, *(peer.origin for peer in self._peers.living)))
        if owner == me:
            return self._grant(what, ttl_s, me)
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

    def acted(self, action: Action) -> None:
        """As of ActionLocks."""
        self._journal.add(acted(action))

    def receive(self, message: Message) -> None:
        """Handle a peer's claim, or its answer."""
        if isinstance(message, ClaimAsked):
            granted = self._grant(message.what, message.ttl_s, message.origin)
            self._peers.send_to(message.origin, ClaimAnswered(self._peers.origin, message.what, granted))
        elif isinstance(message, ClaimAnswered):
            answer = self._asked.get((message.origin, message.what))
            if answer is not None and not answer.done():
                answer.set_result(message.granted)

    def _grant(self, what: str, ttl_s: float, to: Origin) -> bool:
        now = self._clock()
        holder, until = self._granted.get(what, (to, now))
        if holder != to and now < until:
            return False
        self._granted[what] = (to, now + ttl_s)
        return True


def owner_of(what: str, candidates: Iterable[Origin]) -> Origin:
    """Return the owner of a claim, the same at all proxies with the same candidates."""
    return max(candidates, key=lambda one: xxh3_64_intdigest(f"{what} {one} {one.epoch}".encode()))
