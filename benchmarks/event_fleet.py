"""KV events of a thousand engines, followed by one core: how many a second, and what the index of them holds.

`python -m benchmarks.event_fleet [--events N] [--rounds N] [--out FOLDER]`. Messages as vLLM publishes them are
decoded, hashed and indexed, without the socket and the counters of a stream. CPU time of this process, so that other
load on the machine counts little. Writes event-fleet.md."""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import psutil

from kvproxy.base.types import EndpointId
from kvproxy.cache.indexes.precise import PreciseIndex
from kvproxy.features.kv_events.decoding import Skipped, decode_batch, slice_events

ENGINES = 1000
BLOCK_TOKENS = 16
EVENT_BLOCKS = 4
CHAIN_EVENTS = 64  # of one conversation: 4,096 tokens
WANTED = 20_000
HELD_TOKENS = 2_000_000
_HELD_ENGINES = 4  # of which the memory is measured
_SLICE_BLOCKS = 512

ABOUT = """\
# KV events of a fleet

`{command}`, kvproxy {revision}. {engines:,} engines in turn publish `BlockStored` of {event_blocks} blocks of
{block_tokens} tokens, each below the one before it, in conversations of {chain:,} tokens; `and evicted`: each event
evicts as many blocks, one `BlockRemoved` each, as vLLM sends them. Decoded, hashed and indexed in one process, CPU
time, medians of {rounds} rounds of {events:,} events; the sockets' own cost comes on top.

| | CPU us an event | events a second of a core | wanted |
|---|---|---|---|
"""

MEMORY = """
A block costs {size:.0f} bytes (resident memory, {held_engines} engines that hold {held_tokens:,} tokens each, in
prompts of {chain:,} tokens, an event each). {engines:,} such engines make {whole:.1f} GB in each process that follows
them all.

An engine that is not followed is known by what was routed to it: nothing of its evictions and of other routers'
requests is seen until answers contradict the estimate.
In replays of three traces on 8 engines at load 0.7 ([replicas](replicas.md), one router) the mean time to first token
was 2.089, 1.756 and 0.538 s by routed requests alone, and 2.051, 1.756 and 0.538 s with KV events of all engines.
"""


class Engine:
    """Publishes messages of its own conversations, without an end."""

    def __init__(self, number: int, rng: random.Random, *, evicts: bool) -> None:
        self.name = EndpointId(f"e{number}")
        self._rng = rng
        self._evicts = evicts
        self._seq = 0
        self._parent: int | None = None
        self._held: list[int] = []

    def message(self, events: int) -> list[bytes]:
        """Return the frames of the next one."""
        made = [one for _ in range(events) for one in self._step()]
        payload = msgspec.msgpack.encode([0.0, made, 0])
        self._seq += 1
        return [b"kv-events", self._seq.to_bytes(8, "big"), payload]

    def _step(self) -> Iterator[dict[str, object]]:
        if self._seq % CHAIN_EVENTS == 0:
            self._parent = None
        names = [self._rng.getrandbits(63) for _ in range(EVENT_BLOCKS)]
        tokens = [self._rng.randrange(150_000) for _ in range(EVENT_BLOCKS * BLOCK_TOKENS)]
        if self._evicts:
            for name in self._held:
                yield {"type": "BlockRemoved", "block_hashes": [name], "medium": "GPU", "group_idx": 0}
            self._held = names
        yield stored(names, self._parent, tokens)
        self._parent = None if self._evicts else names[-1]


def stored(names: Sequence[int], parent: int | None, tokens: Sequence[int]) -> dict[str, object]:
    """Return the event as vLLM 0.28 and later write it."""
    return {
        "type": "BlockStored",
        "block_hashes": names,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": BLOCK_TOKENS,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None] * len(names),
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }


def follow(index: PreciseIndex, name: EndpointId, frames: Sequence[bytes]) -> None:
    """Apply one message, as a stream does."""
    skipped: Skipped = {}
    for piece, _ in slice_events(decode_batch(frames).steps(skipped), _SLICE_BLOCKS):
        index.apply_events(name, 0, piece)
    assert not skipped


def us_an_event(events: int, together: int, *, evicts: bool, seed: int) -> float:
    """CPU of one event of which `together` share a message."""
    rng = random.Random(seed)
    index = PreciseIndex()
    engines = [Engine(number, rng, evicts=evicts) for number in range(ENGINES)]
    for engine in engines:
        follow(index, engine.name, engine.message(together))
    rounds = max(1, events // (ENGINES * together))
    messages = [(engine.name, engine.message(together)) for _ in range(rounds) for engine in engines]
    gc.collect()
    gc.freeze()
    began_s = time.process_time()
    for name, frames in messages:
        follow(index, name, frames)
    took_s = time.process_time() - began_s
    gc.unfreeze()
    return 1e6 * took_s / (len(messages) * together)


def bytes_a_block() -> float:
    """Resident memory that a block costs, over some engines that hold HELD_TOKENS each."""
    rng = random.Random(5)
    index = PreciseIndex()
    blocks = HELD_TOKENS // BLOCK_TOKENS
    chain = CHAIN_EVENTS * EVENT_BLOCKS
    gc.collect()
    before = psutil.Process().memory_info().rss
    for number in range(_HELD_ENGINES):
        name = EndpointId(f"e{number}")
        for _ in range(blocks // chain):
            names = [rng.getrandbits(63) for _ in range(chain)]
            tokens = array("I", [rng.randrange(150_000) for _ in range(chain * BLOCK_TOKENS)]).tolist()
            payload = msgspec.msgpack.encode([0.0, [stored(names, None, tokens)], 0])
            follow(index, name, [b"", (1).to_bytes(8, "big"), payload])
    gc.collect()
    return (psutil.Process().memory_info().rss - before) / (_HELD_ENGINES * (blocks // chain) * chain)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=40_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--revision", default="", help="of this checkout, for the report")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/reports"))
    options = parser.parse_args()
    size = bytes_a_block()
    command = f"python -m benchmarks.event_fleet --events {options.events} --rounds {options.rounds}"
    shape = {
        "engines": ENGINES,
        "event_blocks": EVENT_BLOCKS,
        "block_tokens": BLOCK_TOKENS,
        "chain": CHAIN_EVENTS * EVENT_BLOCKS * BLOCK_TOKENS,
        "held_engines": _HELD_ENGINES,
        "held_tokens": HELD_TOKENS,
    }
    text = ABOUT.format(
        command=command, revision=options.revision, rounds=options.rounds, events=options.events, **shape
    )
    for together in (1, 8):
        for evicts in (False, True):
            took = [
                us_an_event(options.events, together, evicts=evicts, seed=number) for number in range(options.rounds)
            ]
            us = statistics.median(took)
            case = f"{together} a message" + (", and evicted" if evicts else "")
            text += f"| {case} | {us:.1f} | {1e6 / us:,.0f} | {WANTED:,} |\n"
            print(text.splitlines()[-1], flush=True)
    whole = size * ENGINES * HELD_TOKENS / BLOCK_TOKENS / 1e9
    text += MEMORY.format(size=size, whole=whole, **shape)
    (options.out / "event-fleet.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
