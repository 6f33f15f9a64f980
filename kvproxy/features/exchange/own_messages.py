"""Messages of this process about itself: its batches, of which the latest are kept, and how it stands."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from kvproxy.features.exchange import wire
from kvproxy.features.exchange.bounded_queue import BoundedQueue
from kvproxy.features.exchange.deltas import Routed
from kvproxy.features.exchange.journal import Journal
from kvproxy.features.exchange.wire import Message, Origin

#: Of the batches that were sent so much is kept.
MAX_SENT_BYTES = 4 * 1024 * 1024
_BATCH_BYTES = 100


class OwnMessages:
    """`send` is called with bytes for one peer, or for all."""

    def __init__(self, journal: Journal, send: Callable[[bytes, Origin | None], None]) -> None:
        self.sent: BoundedQueue[tuple[int, bytes]] = BoundedQueue(MAX_SENT_BYTES)
        self._journal = journal
        self._send = send

    def send_to(self, peer: Origin | None, message: Message) -> None:
        """To one peer, or to all."""
        self._send(wire.encode(message), peer)

    def publish(self, now: float, *, to_all: bool) -> int:
        """Hand out what the journal has; returns how many batches. They are kept for those who ask later, and sent
        `to_all` if there are peers."""
        count = 0
        for batch in self._journal.take_batches(now):
            payload, dropped = wire.encode_batch(batch)
            self._journal.dropped += dropped
            self.sent.append((batch.seq, payload), len(payload) + _BATCH_BYTES)
            if to_all:
                self._send(payload, None)
            count += 1
        return count

    def answer(self, to: Origin, first: int, now: float) -> None:
        """Send one peer the batches from this one on, if they are kept, and then how this process stands: all loads and
        requests under way."""
        self.publish(now, to_all=True)
        journal = self._journal
        oldest = next((seq for seq, _ in self.sent), journal.seq + 1)
        if oldest <= first:
            for seq, payload in self.sent:
                if seq >= first:
                    self._send(payload, to)
        said = partial(wire.PeerSnapshot, journal.origin, journal.seq, oldest, journal.told)
        loads = journal.rows(now)
        *parts, last = in_parts(journal.open.values()) or [[]]
        while len(loads) > wire.MAX_ROWS:
            self.send_to(to, said([], loads[: wire.MAX_ROWS], True))
            del loads[: wire.MAX_ROWS]
        for part in parts:
            self.send_to(to, said(part, [], True))
        self.send_to(to, said(last, loads, False))


def in_parts(routed: Iterable[Routed]) -> list[list[Routed]]:
    """In lists that fit into a message each, beside loads."""
    parts: list[list[Routed]] = []
    room = 0
    for one in routed:
        size = 100 + len(one.hashes)
        if size > room:
            parts.append([])
            room = wire.MAX_BYTES
        parts[-1].append(one)
        room -= size
    return parts
