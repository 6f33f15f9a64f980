"""How far a prompt's blocks are there without a gap: on the device, and from there on the tiers below it."""

from __future__ import annotations

from array import array
from collections.abc import Mapping

from kvproxy.prefix.precise.run import Run

#: Bit of the engine's own memory; every other bit is a lower tier's.
DEVICE = 1
LOWER = 0xFE

_MISSING = {mask: bytes(not tiers & mask for tiers in range(256)) for mask in (DEVICE, LOWER)}


#: Leading blocks on the device, those with the ones that follow on lower tiers, and where the prompt last left a run
#: before its end: a good guess for the next source.
Depths = tuple[int, int, int]


def match(firsts: Mapping[int, Run], hashes: array[int], guess: int = 0) -> Depths:
    """Since a hash names its whole prefix, a block follows the one above it in its run or begins a run."""
    depth, n, device = 0, len(hashes), -1
    while depth < n:
        run = firsts.get(hashes[depth])
        if run is None:
            break
        blocks, start = run.blocks, run.start
        count = len(blocks) - start
        end = depth + count
        if end > n or blocks[-1] != hashes[end - 1]:
            if (
                depth < guess < end
                and guess < n
                and blocks[start + guess - depth - 1] == hashes[guess - 1]
                and blocks[start + guess - depth] != hashes[guess]
            ):
                count = guess - depth
            else:
                count = _common(blocks, start, hashes, depth)
                guess = depth + count
        if device < 0 and run.mixed is None and run.tiers & DEVICE:
            depth += count
            continue
        here = 0
        if device < 0:
            here = _leading(run, 0, count, DEVICE)
            if here < count:
                device = depth + here
        if device >= 0:
            here = _leading(run, here, count, LOWER)
            if here < count:
                return device, depth + here, guess
        depth += count
    return depth if device < 0 else device, depth, guess


def _leading(run: Run, skip: int, count: int, mask: int) -> int:
    """How many of the run's first `count` blocks, the first `skip` given, come before one on none of these tiers."""
    if run.mixed is None:
        return count if run.tiers & mask else skip
    found = run.mixed[run.start + skip : run.start + count].translate(_MISSING[mask]).find(1)
    return count if found < 0 else skip + found


def _common(blocks: array[int], start: int, hashes: array[int], depth: int) -> int:
    """Leading blocks the run shares with the prompt from `depth` on, at least one; once apart they never meet again."""
    low, high = 1, min(len(blocks) - start, len(hashes) - depth)
    while low < high:
        middle = (low + high + 1) // 2
        if blocks[start + middle - 1] == hashes[depth + middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
