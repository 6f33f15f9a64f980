"""Cost of a request's routing decision in the proxy, by its parts, and how that grows.

`python -m benchmarks.decision [--rounds N] [--out FOLDER]`; writes decision.md and decision.json. The proxy's own
objects decide (the kvcache service and a cluster with kv_aware), one process and one core, no sockets; first sights,
next turns and prompts asked again alternate, and so do the two kinds of knowledge, round by round."""

from __future__ import annotations

import argparse
import gc
import json
import logging
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.decision_world import IN_FLIGHT, SYSTEM_TOKENS, TURN_TOKENS, Decided, World
from benchmarks.stopwatch import InFrontOf, Stopwatch

TOKENS, ENDPOINTS = 4096, 8
#: Microseconds at the median, everything included.
LIMITS = {"first sight": 200.0, "next turn": 60.0}
CASES = ("first sight", "next turn", "asked again")
KNOWLEDGE = {"what was routed": False, "routed + KV events": True}
GROWTH_ENDPOINTS = (2, 8, 32, 128, 512)
GROWTH_TOKENS = (1024, 4096, 16_384, 32_768, 65_536, 131_072)
_BATCH = 16

ABOUT = """\
`{command}` ({machine}). Microseconds of everything a decision costs the proxy with kv_aware: hashing, token memory,
indexes, facts, cost over all endpoints, the reservation, and after the answer the ledger, the learned speeds and the
indexes. {tokens} tokens of prompt and {endpoints} endpoints unless said otherwise, {in_flight} requests under way on
each; all chats share a system prompt of {system} tokens, a next turn adds {turn}. KV events cover what the engines
computed; of a first sight no tokens are known, of a next turn those of the turn before. A client waits for what comes
until a place is reserved; settling follows its first token and its end. Other work on the machine slows everything by
about one factor: the quietest round is nearest to an idle one.
"""

WANTED = """\
Wanted with KV events, next turn: at most 100, 110, 120 and 150 us at 8, 128, 512 and 2,000 endpoints. What grows is one
cost for each endpoint, and what those hold that have changed since the last prompt; what most hold of a common system
prompt is kept and merged at once.

An order of endpoints that lasts from one decision to the next was looked for again. Within the 20 ms for which speeds
and usual waits stand in a large pool, the cost of an endpoint whose ledger is unchanged moves by the progress of its
prefill and by the own work of the request alone: a list sorted at their beginning, with bounds for both, would decide
the same to the digit. Counted in this benchmark's traffic, such a list still has to weigh 25 of 128 and 129 of 512
endpoints on average (a median of 65): those whose ledger has changed, since every placement, first token and end
changes one, and those that cannot be told from the cheapest by a bound. Once every 20 ms it is sorted anew, over all
endpoints. The choice is 0.6 of a decision at 512, so that the whole would take about 0.55 of its time there, and the
rest grows with endpoints as well: facts by endpoint, and lateness, which is judged by all of them. That is a second
form of the choice, of the facts and of `Choice.costs` for less than half of the time, and far from what is wanted; it
was not built. A usual wait that is kept for a few endpoints would be another average than one to which every decision
adds all.

A choice that lasts for one decision was built, too: it weighs only what a lower bound on the cost does not rule out,
4.7 of 128 and 18 of 512 endpoints on average (medians 1 and 2), and decides the same. Counted in bytecodes, 99 of the
110 thousand of a decision at 512 endpoints are looks at each of them, 194 a look: its cost 80, its wait 85, its own
work 29. Its bound needs each wait, too, for the pool's mean, and every first token, for lateness: 0.80 of the bytecodes
and 0.87 of the choice's time were left, for 70 lines more and costs that are worked out when they are read. Most of the
time is memory, not arithmetic: a wait takes 0.54 to 0.85 us where a decision comes to ledgers that the caches have
lost, and 0.26 us when it is asked for again. So it was left out. What would spare that is ledgers that report their
changes to the pool, and a mean wait kept as a sum that moves with time. A request under way keeps 26 bytes of facts and
32 of costs for each endpoint: 60 MB for 2,048 requests at 512 endpoints, 0.9 GB for 8,000 at 2,000.

Costs of a large pool as columns of numpy, equal to the bit, were built and measured (the choice alone, the same overlap
everywhere and more at one endpoint, fastest twentieth of 600 choices on a busy machine):

| endpoints | one by one, us | by columns, us |
|---|---|---|
| 2 | 13 | 13 |
| 8 | 20 | 20 |
| 32 | 34 | 62 |
| 64 | 58 | 65 |
| 128 | 106 | 75 |
| 512 | 416 | 120 |
| 2,000 | 1,737 | 271 |

Columns read again only the ledgers that changed, and price what most endpoints hold once; two passes over the overlaps
by endpoint and dozens of operations of numpy are left. Of a whole decision, next turn with KV events, that leaves 0.95
at 128 endpoints and 0.68 at 512 (two runs each in turns, quietest rounds). The facts grow as much as
the choice did: with 2,000 endpoints they take 1.1 to 1.6 ms: three dicts by endpoint, one question to each index.
numpy takes 15 MB of each process and 0.12 to 0.27 s to import, which stops the event loop for 30 ms even from another
thread. So it was left out. Facts as masks of endpoints by what they hold, which the approximate index has already,
would spare both the dicts and the look at each endpoint; columns are worth their price only with them.
"""

Samples = dict[str, list[Decided]]


def one_round(world: World, tokens: int, batch: int = _BATCH) -> Samples:
    """Each case `batch` times, alternating, with what they need prepared before."""
    later, known = (
        [world.chat(tokens - TURN_TOKENS) for _ in range(batch)],
        [next(world.chat(tokens)) for _ in range(batch)],
    )
    for chat, again in zip(later, known, strict=True):
        world.ask(next(chat))
        world.ask(again)
    world.fill(tokens)
    new = [next(world.chat(tokens)) for _ in range(batch)]
    turns = [next(chat) for chat in later]
    samples: Samples = {case: [] for case in CASES}
    for asked in zip(new, turns, known, strict=True):
        for case, each in zip(CASES, asked, strict=True):
            samples[case].append(world.ask(each))
    world.fill(tokens)
    return samples


def measured(worlds: Mapping[str, World], tokens: int, rounds: int, batch: int = _BATCH) -> dict[str, Any]:
    """By knowledge and case: medians over all, the quietest round's median, p99."""
    for world in worlds.values():
        world.fill(tokens)
        one_round(world, tokens, batch)
    collected: dict[str, dict[str, list[list[Decided]]]] = {name: {case: [] for case in CASES} for name in worlds}
    gc.collect()
    gc.freeze()  # what the worlds hold is as old as a proxy's own indexes; only what is new is looked at again
    for _ in range(rounds):
        for name, world in worlds.items():
            for case, decided in one_round(world, tokens, batch).items():
                collected[name][case].append(decided)
    gc.unfreeze()
    return {name: {case: _figures(rows) for case, rows in cases.items()} for name, cases in collected.items()}


def disturbance(seconds: float = 2.0) -> float:
    """How much slower than at its best this machine runs Python at present: the median of a fixed piece of work."""
    spans = []
    until = time.perf_counter() + seconds
    while (began := time.perf_counter()) < until:
        sum(number * number for number in range(1000))
        spans.append(time.perf_counter() - began)
    return statistics.median(spans) / min(spans)


def _figures(rounds: Sequence[Sequence[Decided]]) -> dict[str, float]:
    every = [decided for one in rounds for decided in one]
    whole = sorted(each.reserved_us + each.settled_us for each in every)
    return {
        "reserved_p50_us": statistics.median(each.reserved_us for each in every),
        "p50_us": statistics.median(whole),
        "quietest_p50_us": min(statistics.median(each.reserved_us + each.settled_us for each in one) for one in rounds),
        "p99_us": whole[min(len(whole) - 1, int(0.99 * len(whole)))],
    }


def watched(world: World) -> Stopwatch:
    """Stands in front of everything that takes part, from now on."""
    watch, kv, cluster, local = Stopwatch(), world.kv, world.cluster, world.local
    overlap, precise = kv.overlap, local.precise.match_prompt
    local.prompts.hash_prompt = watch.timed("text hashes", local.prompts.hash_prompt)  # type: ignore[method-assign]
    local.find_overlaps = watch.timed("facts", local.find_overlaps)  # type: ignore[method-assign]
    tree = {
        "locate": "approximate index, locate", "hot_blocks": "heat", "lookup": "approximate index, lookup",
        "route": "approximate index, claim",
    }  # fmt: skip
    local.approximate = InFrontOf(local.approximate, watch, {**tree, "confirm": "approximate index, confirm"})  # type: ignore[assignment]
    found: Any = InFrontOf(local.precise, watch, {})

    def lookup(hashes_at: Callable[[int], object]) -> object:
        return precise(watch.timed("token hashes", hashes_at))

    found.match_prompt = watch.timed("precise index, lookup", lookup)
    local.precise = found
    overlap.tokens.recall_tokens = watch.timed("token memory", overlap.tokens.recall_tokens)  # type: ignore[method-assign]
    kv.feedback.finished = watch.timed("compare with the engine", kv.feedback.finished)  # type: ignore[method-assign]
    kv.gather = watch.timed("facts", kv.gather)
    kv.placed = watch.timed("claim", kv.placed)
    kv.finished = watch.timed("follow up", kv.finished)  # type: ignore[method-assign]
    cluster.policies.own.policy.choose = watch.timed("cost", cluster.policies.own.policy.choose)  # type: ignore[method-assign]
    for step in ("decide", "reserve"):
        setattr(cluster, step, watch.timed("screen, reserve", getattr(cluster, step)))
    return watch


def parts_of(world: World, tokens: int, rounds: int) -> dict[str, dict[str, float]]:
    """Return median microseconds per request by case and part. Settling meanwhile is that of others' traffic."""
    world.fill(tokens)
    one_round(world, tokens)
    watch = watched(world)
    seen: dict[str, list[dict[str, float]]] = {case: [] for case in CASES[:2]}
    for _ in range(rounds):
        later = [world.chat(tokens - TURN_TOKENS) for _ in range(_BATCH)]
        for chat in later:
            world.ask(next(chat))
        world.fill(tokens)
        new, turns = [next(world.chat(tokens)) for _ in later], [next(chat) for chat in later]
        for asked in zip(new, turns, strict=True):
            for case, each in zip(seen, asked, strict=True):
                before, outside = dict(watch.seconds), world.spent_us
                world.ask(each)
                took = {part: 1e6 * (watch.seconds[part] - before.get(part, 0.0)) for part in watch.seconds}
                rest = world.spent_us - outside - sum(took.values())
                seen[case].append({**took, "first token, end, learned speeds": rest})
    return {case: _medians(rows) for case, rows in seen.items()}


def _medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = {name for row in rows for name in row}
    medians = {name: statistics.median(row.get(name, 0.0) for row in rows) for name in names}
    return dict(sorted(medians.items(), key=lambda pair: -pair[1]))


def growth(rounds: int) -> dict[str, Any]:
    """Medians by number of endpoints and by prompt length."""
    found: dict[str, Any] = {"endpoints": {}, "tokens": {}}
    for endpoints in GROWTH_ENDPOINTS:
        found["endpoints"][endpoints] = measured(_worlds(endpoints), TOKENS, max(2, rounds // 5))
    for tokens in GROWTH_TOKENS:
        found["tokens"][tokens] = measured(_worlds(ENDPOINTS), tokens, max(2, rounds // 5), batch=8)
    return found


def slope(points: Mapping[int, float]) -> float:
    """Of the straight line with the least squares."""
    xs, ys = list(points), list(points.values())
    return statistics.linear_regression(xs, ys).slope


def _worlds(endpoints: int) -> dict[str, World]:
    return {name: World(endpoints=endpoints, events=events, seed=1) for name, events in KNOWLEDGE.items()}


def _summary(results: Mapping[str, Any]) -> list[str]:
    lines = [
        "| | knows | until a place is reserved, p50 us | and settled, p50 us | quietest round's p50 | p99 us | limit |",
        "|---|---|---|---|---|---|---|",
    ]
    for case in CASES:
        for name, cases in results.items():
            row = cases[case]
            limit = f"{LIMITS[case]:.0f}" if case in LIMITS else ""
            lines.append(
                f"| {case} | {name} | {row['reserved_p50_us']:.0f} | {row['p50_us']:.0f} | "
                f"{row['quietest_p50_us']:.0f} | {row['p99_us']:.0f} | {limit} |"
            )
    return lines


def _parts(parts: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[str]:
    columns = [(name, case) for name in parts for case in parts[name]]
    rows = sorted({part for name, case in columns for part in parts[name][case]}, key=lambda part: -max(
        parts[name][case].get(part, 0.0) for name, case in columns))  # fmt: skip
    lines = ["| us | " + " | ".join(f"{case}, {name}" for name, case in columns) + " |", "|---" * 5 + "|"]
    for part in rows:
        cells = " | ".join(f"{parts[name][case].get(part, 0.0):.1f}" for name, case in columns)
        lines.append(f"| {part} | {cells} |")
    return lines


def _growth(found: Mapping[int, Any], unit: str, per: int) -> list[str]:
    columns = [(name, case) for name in KNOWLEDGE for case in CASES[:2]]
    lines = [f"| {unit} | " + " | ".join(f"{case}, {name}" for name, case in columns) + " |", "|---" * 5 + "|"]
    for number, results in found.items():
        cells = " | ".join(f"{results[name][case]['p50_us']:.0f}" for name, case in columns)
        lines.append(f"| {number} | {cells} |")
    slopes = (slope({n: results[name][case]["p50_us"] for n, results in found.items()}) for name, case in columns)
    each = f"{per} more" if per > 1 else "one more"
    return [*lines, f"| {each} | " + " | ".join(f"+{per * value:.2f}" for value in slopes) + " |"]


def report(document: Mapping[str, Any]) -> str:
    """As Markdown."""
    lines = [
        "# The routing decision", "",
        ABOUT.format(command=document["command"], machine=document["machine"], tokens=TOKENS, endpoints=ENDPOINTS,
                     in_flight=IN_FLIGHT, system=SYSTEM_TOKENS, turn=TURN_TOKENS),
        *_summary(document["results"]), "",
        f"A fixed piece of Python took {document['disturbance'][0]:.2f} times its best before this, and",
        f"{document['disturbance'][1]:.2f} times afterwards.", "",
        "## Where it goes", "",
        "Medians with a stopwatch in front of every part, which costs some microseconds by itself.", "",
        *_parts(document["parts"]), "",
        "## Growth with endpoints", "", *_growth(document["growth"]["endpoints"], "endpoints", 1), "",
        WANTED,
        "## Growth with the prompt", "", *_growth(document["growth"]["tokens"], "tokens", 1024),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/reports"))
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    before = disturbance()
    results = measured(_worlds(ENDPOINTS), TOKENS, arguments.rounds)
    document = {
        "command": f"python -m benchmarks.decision --rounds {arguments.rounds}",
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "limits_us": LIMITS,
        "disturbance": [before, disturbance()],
        "results": results,
        "parts": {
            name: parts_of(World(endpoints=ENDPOINTS, events=events, seed=1), TOKENS, max(2, arguments.rounds // 3))
            for name, events in KNOWLEDGE.items()
        },
        "growth": growth(arguments.rounds),
    }
    text = report(document)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "decision.json").write_text(json.dumps(document, indent=1) + "\n")
    (arguments.out / "decision.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
