"""The precise index beside that of another checkout, interleaved in one run, as ratios.

    python -m benchmarks.precise_index OTHER_CHECKOUT [--entries 400000] [--rounds 5]

The other checkout has a virtual environment in `.venv`. Every measurement is a process of its own, the two in turn;
ratios are this one's to the other's, medians over rounds. Below 1 is better but for `blocks_per_s`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks import prefix_data

HERE = Path(__file__).parents[1]
_LOOKUPS = """
import json, sys, time
from array import array
from kvproxy.cache.indexes.block_events import BlockStored
from kvproxy.cache.prefix.hashing import token_blocks
try:
    from kvproxy.cache.indexes.precise import PreciseIndex, precise_root
except ImportError:
    from kvproxy.prefix.precise import PreciseIndex, precise_root
found = {}
for endpoints in (2, 128):
    index, tokens = PreciseIndex(), array("I", range(256 * 16))
    apply = getattr(index, "apply_events", None) or index.apply  # as earlier versions call it, and the match below
    match = getattr(index, "match_prompt", None) or index.lookup
    for number in range(endpoints):
        held = 256 - number % 64
        names = tuple(range(number * 1000, number * 1000 + held))
        apply(f"e{number}", 0, [BlockStored(names, None, tokens[: held * 16], 16)])
    blocks = token_blocks(tokens, 16, precise_root(16))
    took = []
    for _ in range(400):
        start = time.perf_counter()
        match(lambda size: blocks)
        took.append(1e6 * (time.perf_counter() - start))
    found[f"lookup of 256 blocks at {endpoints} endpoints, us"] = sorted(took)[100]
try:
    from kvproxy.cache.overlap.index_state import FollowedEvents, IndexState
    from kvproxy.cache.overlap.local_indexes import LocalIndexes
except ImportError:  # too early a version
    print(json.dumps(found))
    sys.exit()
common = array("I", range(512))
def chat(number):
    return common + array("I", range(1000 * number, 1000 * number + 3584))
for endpoints in (8, 128, 512):
    local = LocalIndexes(IndexState(), FollowedEvents())
    local.exact = frozenset(f"e{number}" for number in range(endpoints))
    def store(number, tokens):
        blocks = token_blocks(tokens, 16, 1)
        local.precise.apply_events(f"e{number}", 0, [BlockStored(tuple(blocks), None, tokens, 16)])
        local.enter_prompt(f"e{number}", local.approximate.locate(token_blocks(tokens, 64, 2)))
    for number in range(endpoints):
        store(number, chat(number + 1))
    took = []
    for turn in range(300):
        number = turn % endpoints
        store(number, chat(endpoints + turn))  # another engine has changed by each decision
        tokens = chat(1 + (number + 3) % endpoints)
        cursor = local.approximate.locate(token_blocks(tokens, 64, 2))
        start = time.thread_time()
        local.find_overlaps(cursor, bytes_per_token=4.0, tokens=tokens, cache_salt=None, prompt_tokens=4096)
        took.append(1e6 * (time.thread_time() - start))
    found[f"overlaps of a chat behind a common beginning at {endpoints} endpoints, us"] = sorted(took)[75]
print(json.dumps(found))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path)
    parser.add_argument("--entries", type=int, default=400_000)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    ratios: dict[str, list[tuple[float, float]]] = {}
    for _ in range(arguments.rounds):
        ours, others = (_figures(each, arguments.entries) for each in (HERE, arguments.other))
        for name, figure in ours.items():
            ratios.setdefault(name, []).append((figure, others[name]))
    print("| figure | here | there | ratio |\n|---|---|---|---|")
    for name, pairs in ratios.items():
        here, there = (statistics.median(each) for each in zip(*pairs, strict=True))
        print(f"| {name} | {here:.4g} | {there:.4g} | {statistics.median(a / b for a, b in pairs):.2f} |")
    return 0


def _figures(checkout: Path, entries: int) -> dict[str, float]:
    found = dict[str, float]()
    for shape in prefix_data.shapes(entries):
        row = _run(checkout, "--entries", str(entries), "--child", "precise", shape.name)
        found |= {f"{shape.name}, {name}": row[name] for name in ("blocks_per_s", "bytes_per_entry", "lookup_p50_us")}
    return found | _run(checkout, "--steady") | _run(checkout)


def _run(checkout: Path, *arguments: str) -> dict[str, float]:
    python = str(checkout / ".venv" / "bin" / "python") if checkout != HERE else sys.executable
    program = ("-m", "benchmarks.prefix_index", *arguments) if arguments else ("-c", _LOOKUPS)
    done = subprocess.run([python, *program], cwd=checkout, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    sys.exit(main())
