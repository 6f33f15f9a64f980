"""Messages of a peer that came too early: batches that wait for an earlier one, and parts of a snapshot that is not
whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from kvproxy.features.exchange.wire import Batch, PeerSnapshot


class EarlyMessages:
    """`has_room` shows whether so many bytes more may be held, of all peers together."""

    def __init__(self, has_room: Callable[[int], bool]) -> None:
        self.held_bytes = 0
        self.dropped = 0  # for which there was no room
        self.full = False  # one found no room since the latest request: missing ones are not requested one by one
        self.batches: dict[int, tuple[Batch, int]] = {}  # with their bytes
        self._has_room = has_room
        self._parts: list[tuple[PeerSnapshot, int]] = []

    def hold(self, batch: Batch, size_bytes: int) -> None:
        """Hold a batch until it is taken."""
        if batch.seq not in self.batches and self._make_room(size_bytes):
            self.batches[batch.seq] = batch, size_bytes

    def take(self, seq: int) -> Batch:
        """Take a batch that is held."""
        batch, size_bytes = self.batches.pop(seq)
        self.held_bytes -= size_bytes
        return batch

    def take_from(self, seq: int | None) -> Iterator[Batch]:
        """Take the batches from that number on, up to the first that is missing."""
        while seq in self.batches:
            yield self.take(seq)
            seq += 1

    def forget_batches(self, seqs: range) -> None:
        """Forget batches with these numbers."""
        for seq in [seq for seq in self.batches if seq in seqs]:
            self.take(seq)

    def join_parts(self, part: PeerSnapshot, size_bytes: int) -> PeerSnapshot | None:
        """Return the whole snapshot with its last part; None: it is not whole. Of one that finds no room the other
        requests under way count as over."""
        if self._parts and self._parts[0][0].seq != part.seq:
            self._forget_parts()
        if part.more:
            if self._make_room(size_bytes):
                self._parts.append((part, size_bytes))
            return None
        parts = [*(earlier for earlier, _ in self._parts), part]
        self._forget_parts()
        return msgspec.structs.replace(
            part,
            open=[one for each in parts for one in each.open],
            loads=[one for each in parts for one in each.loads],
        )

    def clear(self) -> None:
        """Forget all."""
        self.batches.clear()
        self._parts.clear()
        self.held_bytes = 0
        self.full = False

    def _make_room(self, size_bytes: int) -> bool:
        if not self._has_room(size_bytes):
            self.dropped += 1
            self.full = True
            return False
        self.held_bytes += size_bytes
        return True

    def _forget_parts(self) -> None:
        self.held_bytes -= sum(size_bytes for _, size_bytes in self._parts)
        self._parts.clear()
