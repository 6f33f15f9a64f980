"""Hits of each order of eviction on request traces, against the optimum with knowledge of the future.

    python -m benchmarks.eviction [--traces T,T...] [--sizes X,X...]

Each trace's requests go, one after the other in the order of their nominal times, through one simulated block cache
with room for a share of the trace's distinct blocks. Nothing waits and nothing is routed: only evictions are compared.
Writes eviction.md and eviction.json of benchmarks/reports."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.routing_cells import ROOT, TRACES, trace_of
from kvproxy.cache.prefix.eviction import Weights
from kvproxy.lab.replay.trace import Trace, Turn
from kvproxy.lab.simulator.block_cache import BlockCache
from kvproxy.lab.simulator.engine_io import BlockStored
from kvproxy.lab.simulator.retention import Eviction, Future, Ranking

SIZES = (0.05, 0.1, 0.2)
#: Weighted without the fourth term.
THREE = "three terms"
ORDERS = (*(each.value for each in Eviction if each is not Eviction.OPTIMUM), THREE, Eviction.OPTIMUM.value)


def play(turns: Sequence[Turn], block_size: int, blocks: int, order: str) -> float:
    """Share of all prompt tokens that a cache of so many blocks found."""
    future = Future([turn.blocks for turn in turns]) if order == Eviction.OPTIMUM else None
    weights = Weights(next_use=0.0) if order == THREE else None
    eviction = Eviction.WEIGHTED if order == THREE else Eviction(order)
    lru = eviction is Eviction.LRU
    ranking = None if lru else Ranking(eviction, blocks, future=future, weights=weights)
    cache = BlockCache(blocks, record_events=False, ranking=ranking)
    found = tokens = 0
    for turn in turns:
        hits = cache.match_prefix(turn.blocks, (turn.prompt_tokens - 1) // block_size)
        held = cache.acquire(turn.blocks, hits)
        new = cache.allocate(len(turn.blocks) - hits)
        if new:
            cache.store(new, BlockStored(tuple(turn.blocks[hits:]), turn.blocks[hits - 1] if hits else None))
        if future is not None:
            future.note_prompt(turn.blocks)
        cache.release(held + new)
        found += hits * block_size
        tokens += turn.prompt_tokens
    return found / tokens


def measure(trace: Trace, sizes: Sequence[float]) -> list[dict[str, Any]]:
    """Every order at every size."""
    turns = [turn for _, turn in trace.turns_in_nominal_order(service_s=5.0)]
    distinct = len({block for turn in turns for block in turn.blocks})
    longest = max(len(turn.blocks) for turn in turns)
    rows = []
    for size in sizes:
        blocks = max(round(size * distinct), longest)
        rates = {order: round(play(turns, trace.block_size, blocks, order), 4) for order in ORDERS}
        rows.append({"trace": trace.name, "size": size, "blocks": blocks, "hit_rate": rates})
        print(rows[-1], flush=True)
    return rows


def as_markdown(rows: Sequence[dict[str, Any]], command: str) -> str:
    """Render the report."""
    lines = [
        "# Eviction: what each order finds again", "",
        f"`{command}`. One simulated cache with room for a share of a trace's distinct blocks (at least for its "
        "longest prompt), requests one after the other in the order of their nominal times: share of prompt tokens "
        "found. `lru` is vLLM's order; `lfu` counts all uses that are remembered (of four times as many blocks as "
        "there is room for, as the others); `weighted` is the score of the strategy `evict` as it is "
        "by default, 0.5 for frequency, 0.3 for size, 0.2 for recency and 0.5 for the expected next use; `next_use` is "
        "that term alone, `three terms` are the others; `optimum` evicts what is "
        "needed last, which no cache can know (Belady).", "",
        f"| trace | room | blocks | {' | '.join(ORDERS)} |", "|---|---|---|" + "---|" * len(ORDERS),
    ]  # fmt: skip
    for row in rows:
        rates = row["hit_rate"]
        best = max(rates[order] for order in ORDERS[:-1])
        shown = " | ".join(_bold(rates[order], best, order) for order in ORDERS)
        lines.append(f"| {row['trace']} | {100 * row['size']:g} % | {row['blocks']:,} | {shown} |")
    lines += ["", "| of what the optimum finds beyond lru | " + " | ".join(ORDERS[1:-1]) + " |",
              "|---|" + "---|" * (len(ORDERS) - 2)]  # fmt: skip
    for size in dict.fromkeys(row["size"] for row in rows):
        gains = [[_gain(row["hit_rate"], order) for row in rows if row["size"] == size] for order in ORDERS[1:-1]]
        shown = " | ".join(f"{100 * sum(each) / len(each):+.0f} %" for each in gains)
        lines.append(f"| mean over the traces, room {100 * size:g} % | {shown} |")
    return "\n".join(lines) + "\n"


def _bold(rate: float, best: float, order: str) -> str:
    text = f"{100 * rate:.1f}"
    return f"**{text}**" if rate == best and order != Eviction.OPTIMUM else text


def _gain(rates: dict[str, float], order: str) -> float:
    beyond = rates[Eviction.OPTIMUM] - rates[Eviction.LRU]
    return (rates[order] - rates[Eviction.LRU]) / beyond if beyond else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", default=",".join(TRACES), help="of benchmarks/traces (default: all)")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="shares of the blocks (default %(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "reports", help="folder of the report")
    args = parser.parse_args()
    sizes = [float(each) for each in args.sizes.split(",")]
    rows = [row for name in args.traces.split(",") for row in measure(trace_of(name), sizes)]
    command = "python -m benchmarks.eviction"
    (args.out / "eviction.json").write_text(json.dumps({"command": command, "runs": rows}) + "\n")
    text = as_markdown(rows, command)
    (args.out / "eviction.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
