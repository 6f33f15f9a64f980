"""A path-compressed tree of chained block hashes: a run of blocks costs eight bytes each and is compared at once.

Since a hash names its whole prefix, one table from a run's first hash to its node is enough to descend, and equal last
hashes mean equal runs.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec


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


class PrefixCursor(msgspec.Struct, Generic[N], eq=False):
    """Position of a prompt's hashes in a tree, found once for all lookups and changes of a request.

    The tree may change between two uses; `RadixTree.renew` walks again only if it did so on this path."""

    hashes: array[int]  # not to be changed
    path: list[N] = msgspec.field(default_factory=list)  # nodes wholly on the path
    depth: int = 0  # blocks they cover
    partial: N | None = None  # a node that follows and matches in part,
    inside: int = 0  # with so many blocks
    counted: bool = False  # among the requests for these blocks
    edits: int = -1  # of the tree, when it was renewed last
    splits: int = -1


class RadixTree(Generic[N]):
    """The structure alone; what a node means is its class's business. Not safe for hashes that are not chained."""

    def __init__(self, make: Callable[[array[int]], N]) -> None:
        self._make = make
        self._by_first: dict[int, N] = {}
        self.edits = self.splits = 0  # changes of structure so far, and those of them that lengthen the path to a node
        self.blocks = 0

    def __len__(self) -> int:
        return len(self._by_first)

    def locate(self, hashes: array[int]) -> PrefixCursor[N]:
        """Where these hashes lead now."""
        cursor: PrefixCursor[N] = PrefixCursor(hashes)
        self.renew(cursor)
        return cursor

    def renew(self, cursor: PrefixCursor[N]) -> None:
        """Update the cursor to where its hashes lead now. Not needed while its `edits` are the tree's.

        The nodes above a live one never change but by a split. So a path that covered all hashes is the same as long as
        its last node is there, ends with the same block, and nothing was split."""
        hashes = cursor.hashes
        by_first = self._by_first
        if cursor.splits == self.splits and cursor.path and cursor.depth == len(hashes):
            last = cursor.path[-1]
            if last.hashes[-1] == hashes[-1] and by_first.get(last.hashes[0]) is last:
                cursor.edits = self.edits
                return
        path: list[N] = []
        partial = None
        inside = 0
        depth = 0
        n = len(hashes)
        while depth < n:
            node = by_first.get(hashes[depth])
            if node is None:
                break
            run = node.hashes
            end = depth + len(run)
            if end > n or run[-1] != hashes[end - 1]:
                partial = node
                inside = common_blocks(run, 0, hashes, depth)
                break
            path.append(node)
            depth = end
        cursor.path = path
        cursor.depth = depth
        cursor.partial = partial
        cursor.inside = inside
        cursor.edits = self.edits
        cursor.splits = self.splits

    def has(self, node: N) -> bool:
        """Return True if the node is still part of the tree."""
        return self._by_first.get(node.hashes[0]) is node

    def nodes(self) -> list[N]:
        """All nodes, in no order that means anything."""
        return list(self._by_first.values())

    def extend(self, cursor: PrefixCursor[N], head: N | None) -> None:
        """Complete a cursor, just renewed, to the end of its hashes by a new leaf. `head` is what its partial node was
        split into; None if there was none."""
        path = cursor.path
        hashes = cursor.hashes
        depth = cursor.depth
        if head is not None:
            path.append(head)
            depth += cursor.inside
            cursor.partial = None
            cursor.inside = 0
        if depth < len(hashes):
            path.append(self.grow(path[-1] if path else None, hashes[depth:]))
        cursor.depth = len(hashes)
        cursor.edits = self.edits
        cursor.splits = self.splits

    def grow(self, parent: N | None, hashes: array[int]) -> N:
        """Return a new leaf under `parent` (None: at the root)."""
        self.edits += 1
        node = self._make(hashes)
        _link(node, parent)
        self._by_first[hashes[0]] = node
        self.blocks += len(hashes)
        return node

    def append(self, leaf: N, hashes: array[int]) -> None:
        """Lengthen a leaf."""
        self.edits += 1
        leaf.hashes.extend(hashes)
        self.blocks += len(hashes)

    def split(self, node: N, at: int) -> N:
        """Cut `node` after `at` blocks; returns the new head, `node` keeps its identity as the tail."""
        self.edits += 1
        self.splits += 1
        head = self._make(node.hashes[:at])
        parent = node.parent
        _unlink(node)
        _link(head, parent)
        _link(node, head)
        del node.hashes[:at]
        self._by_first[head.hashes[0]] = head
        self._by_first[node.hashes[0]] = node
        return head

    def cut(self, leaf: N, keep: int) -> None:
        """Forget the blocks of a leaf after the first `keep` (at least one)."""
        self.edits += 1
        self.blocks -= len(leaf.hashes) - keep
        del leaf.hashes[keep:]

    def remove(self, leaf: N) -> None:
        """Forget a leaf. It keeps its parent, so that its last holder can climb."""
        self.edits += 1
        del self._by_first[leaf.hashes[0]]
        self.blocks -= len(leaf.hashes)
        _unlink(leaf)

    def absorb(self, node: N, leaf: N) -> None:
        """Append the only child `leaf` to `node`."""
        self.edits += 1
        del self._by_first[leaf.hashes[0]]
        _unlink(leaf)
        node.hashes.extend(leaf.hashes)


def read_prefix(node: Node) -> array[int]:
    """All hashes from the root to the end of `node`."""
    runs = [node.hashes]
    while node.parent is not None:
        node = node.parent
        runs.append(node.hashes)
    whole: array[int] = array("Q")
    for hashes in reversed(runs):
        whole.extend(hashes)
    return whole


def list_subtree(node: N) -> list[N]:
    """`node` and all below it, every node before its children."""
    found = [node]
    for each in found:
        child = each.child
        while child is not None:
            found.append(child)
            child = child.next
    return found


def _link(node: Node, parent: Node | None) -> None:
    node.parent = parent
    if parent is not None:
        sibling = parent.child
        node.next = sibling
        if sibling is not None:
            sibling.previous = node
        parent.child = node


def _unlink(node: Node) -> None:
    before = node.previous
    after = node.next
    if before is not None:
        before.next = after
    elif node.parent is not None:
        node.parent.child = after
    if after is not None:
        after.previous = before
    node.previous = node.next = None


def common_blocks(one: array[int], start: int, other: array[int], other_start: int) -> int:
    """Leading blocks of `one[start:]` equal to `other[other_start:]`, of which the first is known to be; by bisection,
    since chained hashes never meet again once apart."""
    low = 1
    high = min(len(one) - start, len(other) - other_start)
    while low < high:
        middle = (low + high + 1) // 2
        if one[start + middle - 1] == other[other_start + middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
