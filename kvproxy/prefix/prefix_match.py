"""Longest contiguous prefix of many holders at once, over a table from block hash to a mask of holders."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

from kvproxy.prefix.residency import slots_of


def contiguous_depths(masks: Mapping[int, int], hashes: array[int], closed: int, gapped: int) -> dict[int, int]:
    """Leading blocks by slot (absent: none). `closed` holders have no gaps and are searched by halving; `gapped` ones
    block by block.
    """
    depths: dict[int, int] = {}
    if hashes and closed:
        _halve(masks, hashes, closed, depths)
    if gapped:
        _step(masks, hashes, gapped, depths)
    return depths


def run_length(tiers: Sequence[Mapping[int, int]], hashes: array[int], start: int, holder: int) -> int:
    """Blocks from `start` on that the holder has on any of the tiers, up to the first it has not."""
    for index in range(start, len(hashes)):
        block = hashes[index]
        if not any(masks.get(block, 0) & holder for masks in tiers):
            return index - start
    return len(hashes) - start


def _halve(masks: Mapping[int, int], hashes: array[int], holders: int, depths: dict[int, int]) -> None:
    """Between two depths with the same holders nothing changes; elsewhere look in the middle."""
    n = len(hashes)
    deepest = masks.get(hashes[n - 1], 0) & holders
    for slot in slots_of(deepest):
        depths[slot] = n
    todo = [(0, holders, n, deepest)] if deepest != holders else []
    while todo:
        low, at_low, high, at_high = todo.pop()
        while high - low > 1:
            middle = (low + high) // 2
            here = masks.get(hashes[middle - 1], 0) & holders
            if here == at_high:
                high = middle
            elif here == at_low:
                low = middle
            else:
                todo.append((middle, here, high, at_high))
                high, at_high = middle, here
        for slot in slots_of(at_low & ~at_high if low else 0):
            depths[slot] = low


def _step(masks: Mapping[int, int], hashes: array[int], holders: int, depths: dict[int, int]) -> None:
    depth = 0
    for block in hashes:
        here = masks.get(block, 0) & holders
        for slot in slots_of(holders ^ here if depth else 0):
            depths[slot] = depth
        holders = here
        if not holders:
            return
        depth += 1
    for slot in slots_of(holders if depth else 0):
        depths[slot] = depth
