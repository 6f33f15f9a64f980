"""The most asked-for prefixes and who holds them, for people. Looks at everything, so it does so in slices."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from kvproxy.prefix.approximate.endpoint_lru import Run
from kvproxy.prefix.hashing import TEXT_BLOCK_BYTES

if TYPE_CHECKING:
    from kvproxy.kvcache.parts import Parts

#: Runs looked at before other tasks get their turn: well under a millisecond.
SLICE_RUNS = 512


def _breathe() -> Awaitable[None]:
    return asyncio.sleep(0)


async def hot_prefixes(
    parts: Parts, limit: int, *, pause: Callable[[], Awaitable[None]] = _breathe
) -> list[dict[str, object]]:
    """At most `limit` prefixes, the most touched first: hash of the last block, length, touches (decayed), and by
    endpoint how many of their blocks it is believed to hold."""
    found: list[tuple[float, str, Run]] = []
    for cluster, local in parts.local.items():
        kept = local.approximate.all_runs()
        for start in range(0, len(kept), SLICE_RUNS):
            touched = [(local.approximate.requests(run), cluster, run) for run in kept[start : start + SLICE_RUNS]]
            found = heapq.nlargest(limit, [*found, *touched], key=lambda one: one[0])
            await pause()
    # What was found in an early slice may be gone by now.
    present = [(cluster, run, parts.local[cluster].approximate.requests(run)) for _, cluster, run in found]
    return [_shown(parts, cluster, run, touches) for cluster, run, touches in present if touches > 0.0]


def _shown(parts: Parts, cluster: str, run: Run, touches: float) -> dict[str, object]:
    local = parts.local[cluster]
    hashes = local.approximate.prefix(run)
    return {
        "cluster": cluster,
        "prefix": f"{hashes[-1]:016x}",
        "blocks": len(hashes),
        "estimated_tokens": int(len(hashes) * TEXT_BLOCK_BYTES / parts.ratios.typical),
        "touches": touches,
        "hot": touches >= local.hot.threshold,
        "replicas": {
            str(endpoint): blocks
            for endpoint, blocks in local.approximate.lookup(local.approximate.locate(hashes)).items()
        },
    }
