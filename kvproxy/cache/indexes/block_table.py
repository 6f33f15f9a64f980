"""The blocks of one event source: engine hashes, ours and tiers."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from functools import partial

from kvproxy.cache.indexes.run_matches import Firsts, match_prompt
from kvproxy.cache.indexes.runs import Place, Run, Runs


class BlockTable:
    """One source (endpoint, rank, group). A block is kept, under all its names, while it is on any tier."""

    def __init__(self, block_size: int, *, max_rows: int, max_ghosts: int) -> None:
        self.block_size = block_size
        self._max_rows = max_rows
        self._max_ghosts = max_ghosts
        self._runs = Runs()
        self.firsts: Firsts = self._runs.firsts
        self.match = partial(match_prompt, self.firsts)
        self.walk_tiers = self._runs.walk_tiers
        self.walk_up = self._runs.walk_up
        #: Removed blocks whose children may still come. A BoundedMapping takes four times as long for each of them.
        self._ghosts: OrderedDict[int, int] = OrderedDict()
        self._aliases: dict[int, int] = {}  # a block's further engine hashes: the one its run has
        self._several: dict[int, dict[int, int]] = {}  # of our blocks with several: tiers of each, as bits

    def __len__(self) -> int:
        """Rows: engine hashes of blocks that are there."""
        return self._runs.blocks + len(self._aliases)

    def find_place(self, key: int) -> Place | None:
        """Where the block with this engine hash is; good until the next change."""
        place = self._runs.find_key(key)
        if place is None and self._aliases:
            named = self._aliases.get(key)
            return None if named is None else self._runs.find_key(named)
        return place

    def removed_block(self, key: int) -> int | None:
        """Our hash of a block with this engine hash that was removed not long ago."""
        return self._ghosts.get(key)

    def store_new(self, keys: array[int], blocks: array[int], above: Place | None, tier: int) -> bool:
        """Store a wholly new event, as `store` does, if all of it fits and the parent is at `above` (None: root):
        nearly every event, at a fraction of the cost. Otherwise, or if a key repeats or is the parent's, returns False
        without a change."""
        runs = self._runs
        return (
            runs.firsts.keys().isdisjoint(blocks)
            and (above is None or runs.locate_block(blocks[0], above) is None)
            and (not self._aliases or self._aliases.keys().isdisjoint(keys))
            and len(self) + len(keys) <= self._max_rows
            and runs.append_blocks(keys, blocks, above, 1 << tier) is not None
        )

    def store_blocks(self, keys: array[int], blocks: array[int], parent: int | None, tier: int) -> int:
        """Store consecutive blocks on `tier`, below the block with the engine hash `parent`, there or not (None: root).

        Keys are distinct, and `parent` is none of them. Storing known blocks again changes nothing. Returns how many
        fitted into the bound. Blocks known by the same names are stored at once, the rest block by block."""
        done = 0
        above = parent
        bit = 1 << tier
        while done < len(keys):
            place = None if above is None else self._above(above)
            here = self._runs.locate_block(blocks[done], place)
            known = 0 if here is None or self._several else here[0].count_equal(here[1], keys, blocks, done)
            if here is not None and known:
                here[0].add_tier(here[1], here[1] + known, bit)
                done += known
            elif self._store_one(keys[done], blocks[done], above, bit):
                done += 1
            else:
                break
            above = keys[done - 1]
        return done

    def copy_block(self, key: int, tier: int) -> None:
        """Store a block on `tier` as well, if it is known."""
        place = self.find_place(key)
        if place is not None:
            run, at = place
            run.add_tier(at, at + 1, 1 << tier)
            if run.blocks[at] in self._several:
                self._several[run.blocks[at]][key] |= 1 << tier

    def remove_block(self, key: int, tier: int) -> bool:
        """Remove a block from `tier`; False when it was not known there."""
        place = self.find_place(key)
        if place is None:
            return False
        run, at = place
        tiers = run.tiers_at(at)
        bit = 1 << tier
        names = self._several.get(run.blocks[at]) if self._several else None
        if not (tiers if names is None else names[key]) & bit:
            return False
        if names is not None:
            names[key] ^= bit
            if any(each & bit for each in names.values()):
                return True
        if tiers == bit:
            self._vanish(run, at)
        else:
            run.set_tiers(at, at + 1, tiers ^ bit)
        return True

    def sweep_rows(self, rows: int) -> int:
        """Drop about this many rows of a retired table. Returns the rest of the budget: 0 or less until nothing is
        left."""
        self._aliases.clear()
        return self._runs.sweep_rows(rows)

    def _above(self, key: int) -> Place | None:
        """Where a parent is. One removed under this name may be there under another: rare enough to look everywhere."""
        place = self.find_place(key)
        block = self._ghosts.get(key) if place is None else None
        return place if block is None else self._runs.search_block(block)

    def _store_one(self, key: int, block: int, above: int | None, bit: int) -> bool:
        named = self.find_place(key)
        if named is not None and named[0].blocks[named[1]] != block:
            self._forget(key, *named)
            named = None
        place = None if above is None else self._above(above)
        here = self._runs.locate_block(block, place)
        if named is None and len(self) >= self._max_rows:
            return False
        if here is None:
            self._runs.append_blocks(array("Q", (key,)), array("Q", (block,)), place, bit)
            return True
        run, at = here
        if named is None:
            self._aliases[key] = run.keys[at]
            self._several.setdefault(block, {run.keys[at]: run.tiers_at(at)})[key] = 0
        if block in self._several:
            self._several[block][key] |= bit
        run.add_tier(at, at + 1, bit)
        return True

    def _forget(self, key: int, run: Run, at: int) -> None:
        """Forget the block under a hash that the engine gives to another block."""
        block = run.blocks[at]
        names = self._several.get(block)
        if names is None:
            self._vanish(run, at)
            return
        del names[key]
        if self._aliases.pop(key, None) is None:
            other = next(iter(names))
            del self._aliases[other]
            for each in names.keys() - {other}:
                self._aliases[each] = other
            self._runs.rename_block(run, at, other)
        tiers = 0
        for each in names.values():
            tiers |= each
        if len(names) == 1:
            del self._several[block]
        if tiers:
            run.set_tiers(at, at + 1, tiers)
        else:
            self._vanish(run, at)

    def _vanish(self, run: Run, at: int) -> None:
        """Drop a block that is on no tier any more."""
        block = run.blocks[at]
        names = self._several.pop(block, None) if self._several else None
        for key in (run.keys[at],) if names is None else names:
            self._aliases.pop(key, None)
            self._ghosts.pop(key, None)
            self._ghosts[key] = block
            if len(self._ghosts) > self._max_ghosts:
                self._ghosts.popitem(last=False)
        self._runs.drop_block(run, at)
