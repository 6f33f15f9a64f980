"""A queue with a bound in bytes."""

from __future__ import annotations

from kvproxy.features.exchange.bounded_queue import BoundedQueue


def test_a_queue_drops_its_oldest() -> None:
    """As many as the new one needs room; what is larger than the whole bound is not kept either."""
    queue: BoundedQueue[str] = BoundedQueue(10)
    assert [queue.append(item, size) for item, size in (("a", 4), ("b", 4), ("c", 2))] == [0, 0, 0]
    assert queue.append("d", 5) == 2
    assert (list(queue), queue.held_bytes, queue.next_bytes) == (["c", "d"], 7, 2)
    assert queue.popleft() == "c"
    assert queue.append("e", 11) == 2
    assert (len(queue), queue.held_bytes) == (0, 0)
