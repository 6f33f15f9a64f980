"""A radix tree of pages as SGLang keeps one: a page is held once, and the leaf used least of late goes first. It
announces them one by one."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import pairwise

from kvproxy.lab.simulator.block_cache import PrefixCache
from kvproxy.lab.simulator.engine_io import AllBlocksCleared, BlockRemoved, BlockStored


def hash_pages(token_ids: Sequence[int], page_size: int, *, paired: bool, namespace: str = "") -> list[int]:
    """Return a signed 64-bit hash of each full page, over its keys and all before it. Keys are tokens, or pairs of a
    token and the next: then the last token is in no key of its own. `namespace` distinguishes salts and adapters."""
    keys: Sequence[object] = list(pairwise(token_ids)) if paired else token_ids
    digest = sha256(namespace.encode()).digest() if namespace else b""
    hashes = []
    for start in range(0, len(keys) - page_size + 1, page_size):
        digest = sha256(digest + repr(keys[start : start + page_size]).encode()).digest()
        hashes.append(int.from_bytes(digest[:8], "big", signed=True))
    return hashes


@dataclass(slots=True)
class _Node:
    """A page in the tree."""

    page: int
    parent: int | None
    children: int = 0
    users: int = 0
    used_at: int = 0


class RadixPages(PrefixCache):
    """A page belongs to the tree or to one sequence; of a page that two
    sequences computed, the second is announced to no subscriber and spare when its sequence ends."""

    def __init__(self, capacity_blocks: int, *, page_size: int, record_events: bool = True) -> None:
        super().__init__(capacity_blocks, record_events=record_events)
        self._page_size = page_size
        self._spare = list(range(capacity_blocks))
        self._nodes: dict[int, _Node] = {}  # by hash
        self._hash_of: dict[int, int] = {}  # by page: of the tree's, and of seconds of them
        self._in_use = 0  # pages of the tree with users
        self._leaves: list[tuple[int, int]] = []  # (used_at, hash), some out of date
        self._time = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, block_hash: int) -> bool:
        return block_hash in self._nodes

    @property
    def free_blocks(self) -> int:
        return len(self._spare) + len(self._nodes) - self._in_use

    def count_idle(self, block_hashes: Sequence[int], count: int) -> int:
        return sum(self._nodes[page_hash].users == 0 for page_hash in block_hashes[:count])

    def acquire(self, block_hashes: Sequence[int], count: int) -> list[int]:
        nodes = [self._nodes[page_hash] for page_hash in block_hashes[:count]]
        for node in nodes:
            self._use(node)
        return [node.page for node in nodes]

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages, evicting leaves where none is spare."""
        while len(self._spare) < count:
            self._evict()
        pages = self._spare[:count]
        self._spare = self._spare[count:]
        return pages

    def store(self, blocks: Sequence[int], event: BlockStored) -> None:
        """Put full pages of a sequence that uses them into the tree, and announces those it had not."""
        parent = event.parent
        held = 0
        for page, page_hash in zip(blocks, event.block_hashes, strict=True):
            node = self._nodes.get(page_hash)
            if node is None:
                node = self._nodes[page_hash] = _Node(page, parent)
                if parent is not None:
                    self._nodes[parent].children += 1
            else:
                held += 1
            self._hash_of[page] = page_hash
            self._use(node)
            parent = page_hash
        if held < len(event.block_hashes):
            self.announce(self._rest_of(event, held))

    def release(self, blocks: Sequence[int]) -> None:
        """End one use of each page; what never was in the tree is spare at once."""
        for page in reversed(blocks):
            page_hash = self._hash_of.get(page)
            if page_hash is None:
                self._spare.append(page)
                continue
            node = self._nodes[page_hash]
            if node.page != page:
                self._spare.append(page)
                del self._hash_of[page]
            node.users -= 1
            node.used_at = self._tick()
            if node.users == 0:
                self._in_use -= 1
                self._offer(page_hash, node)

    def clear(self) -> bool:
        if self.free_blocks < self.capacity_blocks:
            return False
        self._spare = list(range(self.capacity_blocks))
        self._nodes.clear()
        self._hash_of.clear()
        self._leaves.clear()
        self.announce(AllBlocksCleared())
        return True

    def _use(self, node: _Node) -> None:
        self._in_use += node.users == 0
        node.users += 1
        node.used_at = self._tick()

    def _evict(self) -> None:
        while True:
            used_at, page_hash = heapq.heappop(self._leaves)
            node = self._nodes.get(page_hash)
            if node is not None and not node.users and not node.children and used_at == node.used_at:
                break
        del self._nodes[page_hash], self._hash_of[node.page]
        self._spare.append(node.page)
        self.announce(BlockRemoved(page_hash))
        if node.parent is not None:
            parent = self._nodes[node.parent]
            parent.children -= 1
            self._offer(node.parent, parent)

    def _offer(self, page_hash: int, node: _Node) -> None:
        """Offer a leaf without users for eviction."""
        if not node.users and not node.children:
            heapq.heappush(self._leaves, (node.used_at, page_hash))

    def _rest_of(self, event: BlockStored, held: int) -> BlockStored:
        return replace(
            event,
            block_hashes=event.block_hashes[held:],
            parent=event.block_hashes[held - 1] if held else event.parent,
            token_ids=event.token_ids[held * self._page_size :],
            extra_keys=event.extra_keys[held:],
        )

    def _tick(self) -> int:
        self._time += 1
        return self._time
