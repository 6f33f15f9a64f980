"""Detection of broken prefixes: planted habits, clean traffic, and its cost.

`python -m benchmarks.prefix_hygiene [--turns N] [--engine URL MODEL] [--lines N] [--out FOLDER]`; writes
prefix-hygiene.md and prefix-hygiene.json. Whole proxies in front of simulated engines on loopback, which count for
themselves what they reuse; with `--engine` the planted habits go to a real one instead.

Planted: sessions of six turns with one habit each, beside a twin without it. The truth about its cost is what the
engine computed for it more than for the twin. Clean: sessions side by side with retries, sub-agents, branches, side
requests, conversations taken back, compaction, and engines with too little memory. Truth is the engine's own count: a
turn that begins with its session's last prompt, and of which the engine reused less than that by more than 256 tokens
and a tenth, was lost. Cost: the service's work for a request with and without looking, in pairs, the least of many."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.hygiene_cost import REPEATS, SESSIONS, Cost, measure_cost
from benchmarks.hygiene_runs import TURNS, Clean, Planted, run_clean, run_planted
from benchmarks.hygiene_traffic import SYSTEM_LINES

TEXT = """# Prefix hygiene

`{command}`, {engines}.

## Planted habits

{sessions} sessions of {turns} turns, one habit each: {named} of {broken} broken turns named with cause and part.
Cost: what the report says against what the engine computed more than for a twin without the habit.

| habit | client | breaks | named | cause | part | tokens said / computed |
|---|---|---|---|---|---|---|
{planted}

{clean}{cost}"""

COST = """## Cost

Microseconds a request. In pairs: the service's whole work for it (hashing, facts, learning), and what looking for
breaks, or a call that does nothing, adds to it; each session served {repeats} times by each side in turn, of each of
its requests the least, medians over {measured} sessions. By itself: one session's looking, 200 times, the least. Load
of the machine's {processors} processors meanwhile: {load:.1f}. Limit: 3 us. By itself
looking keeps it; between other work it does not, where what it needs is not at hand in the processor's caches. The
call itself, between other work: at a session's first turn, when its system prompt, tools and messages are digested
(what they were cannot be found out later, since no text is kept), and at later ones, when the new messages are. What
looking adds beyond its call is what it takes the caches from.

| traffic | service | looking adds | nothing done adds | looking by itself | first turn's call | later ones |
|---|---|---|---|---|---|---|
{rows}
"""

CLEAN = """## Clean traffic

{turns:,} turns of {sessions} sessions on two engines that hold a part of them, {what}.

| | in truth | reported |
|---|---|---|
| lost by the engine | {evicted} | {said_evicted} |
| served by the other engine, which did not hold it | {moved} | {said_moved} |
| compaction | {compacted} | {said_compacted} |
| anything else (false) | 0 | {false} |

Of the reports of lost prompts {wrong} were of turns that were not lost by the engine's own count.

"""


def render(arguments: argparse.Namespace, planted: Sequence[Planted], clean: Clean | None, cost: Sequence[Cost]) -> str:
    """Render the page."""
    rows = [
        f"| {one.habit} | {one.client} | {one.breaks} | {one.named} | "
        f"{', '.join(sorted({cause for cause, _ in one.said})) or '-'} | "
        f"{', '.join(sorted({part for _, part in one.said})) or '-'} | "
        f"{one.tokens_said:,} / {one.tokens_computed:,} ({one.tokens_said / max(1, one.tokens_computed):.2f}) |"
        for one in planted
    ]
    shown = ""
    if clean is not None:
        what = "three kinds of client, with retries, sub-agents side by side, branches, side requests and compaction"
        shown = CLEAN.format(
            turns=clean.turns, sessions=clean.sessions, what=what, evicted=clean.truth["evicted"],
            said_evicted=clean.said["evicted"], moved=clean.truth["moved"], said_moved=clean.said["moved"],
            compacted=clean.truth["compaction"], said_compacted=clean.said["compaction"], false=len(clean.false),
            wrong=clean.wrong,
        )  # fmt: skip
    real = f" --engine URL MODEL --lines {arguments.lines}" if arguments.engine else ""
    return TEXT.format(
        command="python -m benchmarks.prefix_hygiene" + real,
        engines="a real vLLM" if arguments.engine else "simulated engines",
        sessions=len(planted), turns=TURNS, named=sum(one.named for one in planted),
        broken=sum(one.breaks for one in planted), planted="\n".join(rows), clean=shown,
        cost=_render_cost(cost) if cost else "",
    )  # fmt: skip


def _render_cost(cost: Sequence[Cost]) -> str:
    rows = "\n".join(
        f"| {one.traffic} | {one.without:.1f} | {one.added:.1f} | {one.nothing:.1f} | {one.alone:.1f} | "
        f"{one.first:.1f} | {one.later:.1f} |"
        for one in cost
    )
    return COST.format(
        rows=rows, processors=os.cpu_count(), load=os.getloadavg()[0], repeats=REPEATS, measured=SESSIONS
    )


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--turns", type=int, default=1000)
    parser.add_argument("--engine", nargs=2, metavar=("URL", "MODEL"))
    parser.add_argument("--lines", type=int, default=SYSTEM_LINES, help="of a planted session's system prompt")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "reports")
    arguments = parser.parse_args()
    planted = asyncio.run(run_planted(arguments.engine, arguments.lines))
    clean = None if arguments.engine else asyncio.run(run_clean(arguments.turns))
    cost = [] if arguments.engine else measure_cost()
    name = "prefix-hygiene-vllm" if arguments.engine else "prefix-hygiene"
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / f"{name}.md").write_text(render(arguments, planted, clean, cost))
    ratio = [one.tokens_said / one.tokens_computed for one in planted if one.tokens_computed > 0]
    figures = {
        "planted": [
            [one.habit, one.client, one.breaks, one.named, one.tokens_said, one.tokens_computed] for one in planted
        ],
        "median_cost_ratio": statistics.median(ratio) if ratio else None,
        "clean": None if clean is None else {
            "turns": clean.turns, "truth": dict(clean.truth), "said": dict(clean.said), "false": clean.false,
            "wrong": clean.wrong,
        },
        "cost_us": [asdict(one) for one in cost],
    }  # fmt: skip
    (arguments.out / f"{name}.json").write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
