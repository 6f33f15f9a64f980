"""Prefix indexes side by side: ours and NVIDIA's RadixTree on the same prompts in the same run.

`python -m benchmarks.prefix_index [--entries 1000000] [--rounds 3] [--peer-python PATH] [--out FOLDER]`. The peer wants
`pip install ai-dynamo-runtime==1.6.1`, in this interpreter or in the one of `--peer-python`; without it the report
names the reason for its missing rows. Every measurement is a process of its own; rounds are interleaved, medians
reported. Writes prefix-index.md and prefix-index.json."""

from __future__ import annotations

import argparse
import gc
import json
import platform
import shlex
import statistics
import subprocess
import sys
import time
import tracemalloc
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import prefix_data as data
from benchmarks.prefix_steady import steady
from kvproxy.base.types import EndpointId
from kvproxy.cache.indexes.approximate import ApproximateIndex
from kvproxy.cache.indexes.precise import PreciseIndex, precise_root
from kvproxy.cache.prefix.hashing import root_seed, token_blocks
from kvproxy.features.kv_events.decoding import decode_batch

PEER = "NVIDIA RadixTree"
LIMITS = {"blocks_per_s": 2e6, "lookup_p50_us": 20.0, "bytes_per_entry": 80.0}  # at least, under, at most
ABOUT = """\
Limits: at least 2 M blocks/s, a 2 048-block lookup under 20 us p50, at most 80 bytes an entry; **what misses one is
bold**. Blocks/s are by CPU time of all threads, so that a busy machine blurs them less. Bytes an entry are the growth
of resident memory (for the approximate index the larger of that and tracemalloc's count).

The approximate index is told whole prompts, each routed and confirmed. The precise index and the peer are told each
prompt's new blocks in one event. Ours gets it parsed and hashes the 16 tokens of each block; the second figure includes
reading the msgpack in which engines publish it. The peer gets block hashes without tokens, as JSON that it parses.

Where the precise index misses its limits: each block has a key in a plain dict, which costs some hundred bytes and some
hundred nanoseconds; what an event costs by itself, and a run besides its blocks, weighs as much where runs are short
(kvproxy/cache/prefix/README.md, benchmarks/precise_index.py).
"""
_NAMES = [EndpointId(f"endpoint-{n}") for n in range(data.ENDPOINTS)]
_BLOCK_TOKENS = 16


def main() -> int:
    arguments = _arguments()
    if arguments.child:
        _child(*arguments.child, entries=arguments.entries)
        return 0
    if arguments.steady:
        print(json.dumps(steady()))
        return 0
    skipped: dict[str, str] = {}
    full: list[dict[str, float]] = []
    samples: dict[str, dict[str, list[dict[str, float]]]] = {}
    for _ in range(arguments.rounds):
        for shape in data.shapes(arguments.entries):
            for name, command in _commands(arguments, shape.name):
                if name in skipped:
                    continue
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode:
                    skipped[name] = (done.stderr.strip().splitlines() or ["failed"])[-1]
                    continue
                samples.setdefault(shape.name, {}).setdefault(name, []).append(json.loads(done.stdout))
        command = [sys.executable, "-m", "benchmarks.prefix_index", "--steady"]
        full.append(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
    results = {
        shape: {
            name: {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
            for name, rounds in by_name.items()
        }
        for shape, by_name in samples.items()
    }
    at_capacity = {key: statistics.median(each[key] for each in full) for key in full[0]}
    _write(arguments, results, _hashing(), at_capacity, skipped)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=1_000_000, help="(endpoint, block) pairs in the index")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter with ai-dynamo-runtime")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "reports")
    parser.add_argument("--steady", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--child", nargs=2, metavar=("INDEX", "SHAPE"), help=argparse.SUPPRESS)
    return parser.parse_args()


def _commands(arguments: argparse.Namespace, shape: str) -> Iterator[tuple[str, list[str]]]:
    ours = [sys.executable, "-m", "benchmarks.prefix_index", "--entries", str(arguments.entries), "--child"]
    yield "kvproxy approximate", [*ours, "approximate", shape]
    yield "kvproxy precise", [*ours, "precise", shape]
    peer = Path(__file__).with_name("prefix_peer.py")
    yield PEER, [arguments.peer_python, str(peer), shape, str(arguments.entries)]


def _child(index: str, name: str, *, entries: int) -> None:
    shape = next(each for each in data.shapes(entries) if each.name == name)
    print(json.dumps({"approximate": _approximate, "precise": _precise}[index](shape)))


def _approximate(shape: data.Shape) -> dict[str, float]:
    asked = data.queries(shape)
    index, spent, memory = _filled_approximate(shape)

    def lookup(hashes: array[int]) -> object:
        return index.lookup(index.locate(hashes))

    assert max(index.lookup(index.locate(asked[0])).values()) == shape.blocks
    assert index.counts.entries == shape.stored
    result = {"blocks_per_s": shape.prompts * shape.blocks / spent, **data.time_lookups(lookup, asked)}
    entries = index.counts.entries
    del index
    gc.collect()
    tracemalloc.start()
    index, _, _ = _filled_approximate(shape)
    assert index.counts.entries == entries
    traced = tracemalloc.get_traced_memory()[0]
    return {**result, "bytes_per_entry": max(memory, traced) / entries}


def _filled_approximate(shape: data.Shape) -> tuple[ApproximateIndex, float, int]:
    """Each prompt routed and confirmed, as the proxy does; seconds spent and resident bytes gained."""
    index = ApproximateIndex(capacity_blocks=shape.stored)
    before, spent = data.resident_bytes(), 0.0
    for endpoint, hashes, _ in data.prompts(shape):
        start = time.process_time()
        index.confirm(index.route(_NAMES[endpoint], index.locate(hashes)))
        spent += time.process_time() - start
    return index, spent, data.resident_bytes() - before


def _precise(shape: data.Shape) -> dict[str, float]:
    """Events of whole prompts with 16 tokens a block; hashing the tokens is part of following them."""
    index = PreciseIndex()
    before, spent, wire_spent = data.resident_bytes(), 0.0, 0.0
    prompts = array("I")
    for number, (endpoint, hashes, known) in enumerate(data.prompts(shape)):
        tokens = _tokens(hashes)
        parent = hashes[known - 1] if known else None
        if number % max(1, shape.prompts // 100) == 0:
            prompts += tokens
        frames = _frames(hashes[known:].tolist(), parent, tokens[known * _BLOCK_TOKENS :].tolist())
        start = time.process_time()
        events = [*decode_batch(frames).events({})]
        read = time.process_time()
        index.apply_events(_NAMES[endpoint], 0, events)
        spent += time.process_time() - read
        wire_spent += read - start
    memory = data.resident_bytes() - before - len(prompts) * prompts.itemsize
    per_prompt = shape.blocks * _BLOCK_TOKENS
    filling = array("I", range(data.LOOKUP_BLOCKS * _BLOCK_TOKENS))
    asked = [
        token_blocks(
            (prompts[at : at + per_prompt] + filling)[: len(filling)], _BLOCK_TOKENS, precise_root(_BLOCK_TOKENS)
        )
        for at in range(0, len(prompts), per_prompt)
    ]
    asked *= -(-data.LOOKUPS // len(asked))
    found = index.match_prompt(lambda size: asked[0])
    assert max(match.tokens for match in found.values()) == per_prompt

    def lookup(hashes: array[int]) -> object:
        return index.match_prompt(lambda size: hashes)

    return {
        "blocks_per_s": shape.stored / spent,
        "blocks_per_s_with_reading": shape.stored / (spent + wire_spent),
        "bytes_per_entry": memory / shape.stored,
        **data.time_lookups(lookup, asked[: data.LOOKUPS]),
    }


def _tokens(hashes: array[int]) -> array[int]:
    """Return 16 tokens a block, derived from its hash."""
    return array("I", [each >> shift & 0xFFFF for each in hashes for shift in range(_BLOCK_TOKENS)])


def _frames(hashes: list[int], parent: int | None, tokens: list[int]) -> tuple[bytes, bytes]:
    """One stored run as an engine publishes it."""
    event = {
        "type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens,
        "block_size": _BLOCK_TOKENS,
    }  # fmt: skip
    return bytes(8), msgspec.msgpack.encode([0.0, [event]])


def _hashing() -> dict[str, float]:
    """Microseconds to hash 4 096 tokens, by block size; the least of several repeats."""
    tokens = array("I", range(4096))
    seed = root_seed(block_size=16, model="m")

    def best(call: Callable[[], object]) -> float:
        spans = []
        for _ in range(200):
            start = time.perf_counter()
            call()
            spans.append(1e6 * (time.perf_counter() - start))
        return statistics.median(spans)

    return {f"blocks of {size}": best(partial(token_blocks, tokens, size, seed)) for size in (16, 64, 256)}


def _write(
    arguments: argparse.Namespace,
    results: dict[str, dict[str, dict[str, float]]],
    hashing: dict[str, float],
    at_capacity: dict[str, float],
    skipped: dict[str, str],
) -> None:
    command = shlex.join(
        ["python", "-m", "benchmarks.prefix_index", f"--entries={arguments.entries}", f"--rounds={arguments.rounds}"]
    )
    machine = f"{platform.machine()}, Python {platform.python_version()}, {data.ENDPOINTS} endpoints"
    document: dict[str, Any] = {
        "command": command, "machine": machine, "limits": LIMITS, "results": results, "hashing_us": hashing,
        "events_us": at_capacity, "skipped": skipped,
    }  # fmt: skip
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "prefix-index.json").write_text(json.dumps(document, indent=1) + "\n")
    lines = ["# Prefix index", "", f"`{command}` ({machine}). Medians over rounds, each in a process of its own.", ""]
    for shape in data.shapes(arguments.entries):
        lines += _table(shape, results.get(shape.name, {}))
    lines += ["Hashing 4 096 tokens: " + ", ".join(f"{us:.0f} us in {name}" for name, us in hashing.items()) + "."]
    lines += ["", "Microseconds for the precise index to follow one event, parsed: "]
    lines[-1] += "; ".join(f"{name} {us:.1f}" for name, us in at_capacity.items()) + "."
    lines += ["", *ABOUT.splitlines()]
    lines += [f"- {name}: not measured, {why}" for name, why in skipped.items()]
    text = "\n".join(lines) + "\n"
    (arguments.out / "prefix-index.md").write_text(text)
    print(text)


def _table(shape: data.Shape, rows: dict[str, dict[str, float]]) -> list[str]:
    lines = [
        f"## {shape.name}: {shape.prompts} prompts of {shape.blocks} blocks, {shape.shared} of them shared", "",
        "| | M blocks/s | read from msgpack too | 2 048-block lookup p50 us | p99 us | CPU us | bytes an entry |",
        "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for name, row in rows.items():
        reading = row.get("blocks_per_s_with_reading")
        figures = (
            _judged(row, "blocks_per_s", f"{row['blocks_per_s'] / 1e6:.2f}"),
            "" if reading is None else f"{reading / 1e6:.2f}",
            _judged(row, "lookup_p50_us", f"{row['lookup_p50_us']:.1f}"),
            f"{row['lookup_p99_us']:.1f}",
            f"{row['lookup_cpu_us']:.1f}",
            _judged(row, "bytes_per_entry", f"{row['bytes_per_entry']:.1f}"),
        )
        lines.append(f"| {name} | " + " | ".join(figures) + " |")
    return [*lines, ""]


def _judged(row: dict[str, float], figure: str, text: str) -> str:
    """Bold where the limit is missed."""
    met = row[figure] >= LIMITS[figure] if figure == "blocks_per_s" else row[figure] <= LIMITS[figure]
    return text if met else f"**{text}**"


if __name__ == "__main__":
    sys.exit(main())
