"""A bounded queue that drops the oldest items."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

V = TypeVar("V")


class BoundedQueue(Generic[V]):
    """Queue of at most `max_bytes` by the sizes its callers give; the oldest items are dropped first."""

    def __init__(self, max_bytes: int) -> None:
        self.held_bytes = 0
        self._max_bytes = max_bytes
        self._items: deque[tuple[V, int]] = deque()

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[V]:
        return (item for item, _ in self._items)

    @property
    def next_bytes(self) -> int:
        """Bytes of the oldest item."""
        return self._items[0][1]

    def append(self, item: V, size_bytes: int) -> int:
        """How many had to be dropped for it."""
        dropped = 0
        self._items.append((item, size_bytes))
        self.held_bytes += size_bytes
        while self.held_bytes > self._max_bytes:
            self.popleft()
            dropped += 1
        return dropped

    def popleft(self) -> V:
        """Take the oldest."""
        item, size_bytes = self._items.popleft()
        self.held_bytes -= size_bytes
        return item

    def clear(self) -> None:
        """Drop all, which nothing counts."""
        self._items.clear()
        self.held_bytes = 0
