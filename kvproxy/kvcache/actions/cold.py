"""Which prefixes may be shrunk or dropped: the longest unused, and none that shares entries with what is in use."""

from __future__ import annotations

from itertools import islice

from kvproxy.kvcache.actions.hotness import Hotness, KnownPrefix

#: Prefixes acted on per pass, and looked at to find them.
PER_PASS = 4
LOOKED_AT = 256


def cold_prefixes(
    hotness: Hotness, instance: str, *, hot_threshold: int, taken: set[int], now: float, skip: set[int] | None = None
) -> list[KnownPrefix]:
    """Candidates at the instance, coldest first. Cache entries are shared by prompts that begin alike, so nothing is
    touched whose head something hot, pinned or just served has as well."""
    looked_at = list(islice(hotness.coldest(instance), LOOKED_AT))
    protected = taken | {one.head for one in looked_at if hotness.count(one, now) >= hot_threshold}
    chosen: list[KnownPrefix] = []
    for one in looked_at:
        if len(chosen) == PER_PASS:
            break
        if one.head not in protected and not (skip and one.key in skip):
            chosen.append(one)
    return chosen
