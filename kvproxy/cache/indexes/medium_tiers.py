"""Tiers of blocks by the engines' names of media."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping

from kvproxy.base.types import LowerTokens, Tier
from kvproxy.cache.indexes.block_table import BlockTable
from kvproxy.cache.indexes.run_matches import count_tiers
from kvproxy.cache.indexes.runs import MAX_TIERS

#: An unknown medium counts as near, since the reverse error costs more.
TIER_OF: Mapping[str, Tier] = {
    "GPU": Tier.DEVICE,
    "CPU_PINNED": Tier.PINNED,
    "DISK": Tier.DISK,
    "STORAGE": Tier.DISK,
    "EXTERNAL": Tier.SHARED,
}


class MediumTiers:
    """Media of one cluster's engines, each a bit of a block's tiers; bit 0 is the engine's own memory."""

    def __init__(self) -> None:
        self.bits = {"GPU": 0}  # by medium
        self.kinds = [Tier.DEVICE]  # in the same order

    def find_bit(self, medium: str | None) -> int | None:
        """Bit of the medium's tier, made on first sight; None beyond the bound."""
        name = "GPU" if medium == "GPU" or not medium else medium.upper()
        bit = self.bits.get(name)
        if bit is None and len(self.bits) < MAX_TIERS:
            bit = self.bits[name] = len(self.bits)
            self.kinds.append(TIER_OF.get(name, Tier.HOST))
        return bit

    def count_lower(self, table: BlockTable, hashes: array[int], device: int, total: int) -> LowerTokens:
        """Return the blocks from `device` up to `total` by the nearest tier that each is on, in tokens."""
        counts: Counter[Tier] = Counter()
        for tiers, blocks in count_tiers(table.firsts, hashes, device, total).items():
            kinds = {kind for bit, kind in enumerate(self.kinds) if bit and tiers >> bit & 1}
            counts[next((tier for tier in Tier if tier in kinds), Tier.HOST)] += blocks
        return tuple([(tier, counts[tier] * table.block_size) for tier in Tier if counts[tier]])
