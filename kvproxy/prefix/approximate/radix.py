"""A path-compressed tree of chained block hashes: a run of blocks costs eight bytes each and is compared at once.

Since a hash names its whole prefix, one table from a run's first hash to its node is enough to descend, and equal last
hashes mean equal runs.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any, Generic, TypeVar


class Node:
    """A run of blocks every holder has wholly or not at all. Siblings are linked, so that a subtree can be walked."""

    __slots__ = ("child", "hashes", "next", "parent", "previous")

    def __init__(self, hashes: array[int]) -> None:
        self.hashes = hashes
        self.parent: Any = None  # nodes of one tree are of one class: the tree's type parameter
        self.child: Any = None
        self.next: Any = None
        self.previous: Any = None


N = TypeVar("N", bound=Node)


class RadixTree(Generic[N]):
    """The structure alone; what a node means is its class's business. Not safe for hashes that are not chained."""

    def __init__(self, make: Callable[[array[int]], N]) -> None:
        self._make = make
        self._by_first: dict[int, N] = {}
        self._asked: array[int] | None = None  # who is walked to find something is mostly walked again to change it
        self._walked: tuple[tuple[N, ...], int, N | None, int] = ((), 0, None, 0)  # until the structure changes
        self.blocks = 0

    def __len__(self) -> int:
        return len(self._by_first)

    def walk(self, hashes: array[int]) -> tuple[list[N], int, N | None, int]:
        """Nodes wholly on the path, blocks they cover, and a node matched in part with its number of matched blocks."""
        if hashes is self._asked:
            known, depth, partial, inside = self._walked
            return [*known], depth, partial, inside
        path: list[N] = []
        partial, inside = None, 0
        depth, n = 0, len(hashes)
        while depth < n:
            node = self._by_first.get(hashes[depth])
            if node is None:
                break
            end = depth + len(node.hashes)
            if end > n or node.hashes[-1] != hashes[end - 1]:
                partial, inside = node, _common(node.hashes, hashes, depth)
                break
            path.append(node)
            depth = end
        self._asked, self._walked = hashes, ((*path,), depth, partial, inside)
        return path, depth, partial, inside

    def has(self, node: N) -> bool:
        """Whether the node is still part of the tree."""
        return self._by_first.get(node.hashes[0]) is node

    def prefix(self, node: N) -> array[int]:
        """All hashes from the root to the end of `node`."""
        runs = [node.hashes]
        while node.parent is not None:
            node = node.parent
            runs.append(node.hashes)
        whole: array[int] = array("Q")
        for hashes in reversed(runs):
            whole.extend(hashes)
        return whole

    def grow(self, parent: N | None, hashes: array[int]) -> N:
        """A new leaf under `parent` (None: at the root)."""
        self._asked = None
        node = self._make(hashes)
        self._link(node, parent)
        self._by_first[hashes[0]] = node
        self.blocks += len(hashes)
        return node

    def split(self, node: N, at: int) -> N:
        """Cut `node` after `at` blocks; returns the new head, `node` keeps its identity as the tail."""
        self._asked = None
        head = self._make(node.hashes[:at])
        parent = node.parent
        self._unlink(node)
        self._link(head, parent)
        self._link(node, head)
        del node.hashes[:at]
        self._by_first[head.hashes[0]] = head
        self._by_first[node.hashes[0]] = node
        return head

    def cut(self, leaf: N, keep: int) -> None:
        """Forget the blocks of a leaf after the first `keep` (at least one)."""
        self._asked = None
        self.blocks -= len(leaf.hashes) - keep
        del leaf.hashes[keep:]

    def remove(self, leaf: N) -> None:
        """Forget a leaf. It keeps its parent, so that who still holds it can climb."""
        self._asked = None
        del self._by_first[leaf.hashes[0]]
        self.blocks -= len(leaf.hashes)
        self._unlink(leaf)

    def absorb(self, node: N, leaf: N) -> None:
        """Append the only child `leaf` to `node`."""
        self._asked = None
        del self._by_first[leaf.hashes[0]]
        self._unlink(leaf)
        node.hashes.extend(leaf.hashes)

    def subtree(self, node: N) -> list[N]:
        """`node` and all below it, every node before its children."""
        found = [node]
        for each in found:
            child = each.child
            while child is not None:
                found.append(child)
                child = child.next
        return found

    def _link(self, node: N, parent: N | None) -> None:
        node.parent = parent
        if parent is not None:
            sibling = parent.child
            node.next = sibling
            if sibling is not None:
                sibling.previous = node
            parent.child = node

    def _unlink(self, node: N) -> None:
        before, after = node.previous, node.next
        if before is not None:
            before.next = after
        elif node.parent is not None:
            node.parent.child = after
        if after is not None:
            after.previous = before
        node.previous = node.next = None


def _common(run: array[int], hashes: array[int], start: int) -> int:
    """Leading blocks of `run` equal to `hashes[start:]`, at least one; chained hashes never meet again once apart."""
    low, high = 1, min(len(run), len(hashes) - start)
    while low < high:
        middle = (low + high + 1) // 2
        if run[middle - 1] == hashes[start + middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
