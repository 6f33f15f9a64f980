"""Blocks that runs have of a prompt. Since a hash names its whole prefix, a block follows the one above it in its run,
or begins a run: runs by our hashes of their first blocks are enough."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping

from kvproxy.cache.indexes.radix import common_blocks
from kvproxy.cache.indexes.runs import DEVICE, LOWER, Run

Firsts = Mapping[int, Run]


def match_prompt(firsts: Firsts, hashes: array[int], guess: int = 0) -> tuple[int, int, int]:
    """Leading blocks on the device, those with the ones that follow on lower tiers, and where the prompt last left a
    run before its end: a good guess for the next source, whose engine often holds as much."""
    depth = 0
    n = len(hashes)
    device = -1
    while depth < n:
        run = firsts.get(hashes[depth])
        if run is None:
            break
        blocks = run.blocks
        start = run.start
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
                count = common_blocks(blocks, start, hashes, depth)
                guess = depth + count
        if device < 0 and run.mixed is None and run.tiers & DEVICE:
            depth += count
            continue
        here = 0
        if device < 0:
            here = run.count_leading(0, count, DEVICE)
            if here < count:
                device = depth + here
        if device >= 0:
            here = run.count_leading(here, count, LOWER)
            if here < count:
                return device, depth + here, guess
        depth += count
    return depth if device < 0 else device, depth, guess


def count_tiers(firsts: Firsts, hashes: array[int], first: int, last: int) -> Counter[int]:
    """Of the blocks from `first` up to `last`, which `match_prompt` found: how many have these bits of tiers."""
    found: Counter[int] = Counter()
    depth = 0
    while depth < last:
        run = firsts[hashes[depth]]
        here = min(common_blocks(run.blocks, run.start, hashes, depth), last - depth)
        skipped = min(max(0, first - depth), here)
        if run.mixed is None:
            found[run.tiers] += here - skipped
        else:
            found.update(run.mixed[run.start + skipped : run.start + here])
        depth += here
    return found


def leading_on(firsts: Firsts, hashes: array[int], bits: int) -> int:
    """Leading blocks that are all on a tier of these bits."""
    depth, (_, last, _) = 0, match_prompt(firsts, hashes)
    while depth < last:
        run = firsts[hashes[depth]]
        here = min(common_blocks(run.blocks, run.start, hashes, depth), last - depth)
        tiers = [run.tiers] * here if run.mixed is None else run.mixed[run.start : run.start + here]
        off = next((at for at, one in enumerate(tiers) if not one & bits), None)
        if off is not None:
            return depth + off
        depth += here
    return depth


def leading_keys(firsts: Firsts, hashes: array[int], count: int) -> array[int]:
    """Keys of the first `count` of these blocks, which `match_prompt` found."""
    keys = array("Q")
    while (depth := len(keys)) < count:
        run = firsts[hashes[depth]]
        here = min(common_blocks(run.blocks, run.start, hashes, depth), count - depth)
        keys += run.keys[run.start : run.start + here]
    return keys


def block_after(firsts: Firsts, hashes: array[int]) -> int | None:
    """Return the block after these, which `match_prompt` found, in the run of the last one; None: it ends there."""
    depth = 0
    while True:
        run = firsts[hashes[depth]]
        here = common_blocks(run.blocks, run.start, hashes, depth)
        depth += here
        if depth == len(hashes):
            at = run.start + here
            return run.blocks[at] if at < len(run.blocks) else None
