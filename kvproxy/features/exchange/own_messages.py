"""Messages of this process about itself: its batches, of which the latest are kept, heartbeats, and how it stands."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kvproxy.features.exchange import wire
from kvproxy.features.exchange.journal import Journal, SentBatches, in_parts
from kvproxy.features.exchange.wire import Message, Origin


class OwnMessages:
    """`send` is called with bytes for one peer, or for all."""

    def __init__(self, journal: Journal, send: Callable[[bytes, Origin | None], None]) -> None:
        self.sent = SentBatches()
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
            payload = wire.encode_batch(batch, self._journal)
            self.sent.keep(batch.seq, payload)
            if to_all:
                self._send(payload, None)
            count += 1
        return count

    def send_again(self, to: Origin, first: int, now: float) -> None:
        """Send one peer the batches from this one on, or how this process stands if they are gone (0: that is
        wanted)."""
        missing = self.sent.since(first) if first else None
        if missing is None:
            self.stand(to, now)
        else:
            for payload in missing:
                self._send(payload, to)

    def stand(self, to: Origin, now: float) -> None:
        """Send one peer all loads and requests under way."""
        self.publish(now, to_all=True)
        journal = self._journal
        oldest = self.sent.oldest or journal.seq + 1
        said = partial(wire.PeerSnapshot, journal.origin, journal.seq, oldest, journal.told, journal.digest)
        loads = journal.rows(now)
        under_way = list(journal.open.values())
        parts = in_parts(under_way)
        while len(loads) > wire.MAX_ROWS:
            self.send_to(to, said([], loads[: wire.MAX_ROWS], True))
            del loads[: wire.MAX_ROWS]
        for part in parts[:-1]:
            self.send_to(to, said(part, [], True))
        self.send_to(to, said([] if not parts else parts[-1], loads, False))
