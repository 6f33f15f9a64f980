"""Tiers on real engines: two vLLMs with small caches of their own, an LMCache server with host memory beside each.

    python -m benchmarks.real_tiers [--repeats N] [--sessions N] [--turns N]

Without a shared store: later turns of chats, of which an engine keeps a quarter and its server's memory all, through a
proxy that follows the engines' KV events and one that asks the coordinator's directory too, for clients with and
without session names. (vLLM's own connector reports engine memory alone.) Arms take turns. Needs what `make test-real`
installs. Writes real-tiers.md and .json of benchmarks/reports."""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.markdown import table
from benchmarks.routing_cells import ROOT
from tests.real.engines.place import MID
from tests.real.kvcache import with_kvcache
from tests.real.prompts import chat, text
from tests.real.tiers.conftest import Tiers, running_tiers
from tests.support.proxy import RunningProxy, running_proxy

#: Words of a first message, of a long one and of a later one; a word is about two tokens.
FIRST_WORDS, LONG_WORDS, MORE_WORDS = 2200, 4000, 100
PAUSE_S = 4.0
BLIND, AWARE = "blind", "aware"
PARTS = ("aware", "long", "named")
_TARGET = 0.6


def say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


async def first_token(proxy: RunningProxy, session: str | None, messages: Sequence[str]) -> tuple[float, str, int]:
    """Seconds to the first event, the endpoint, and the tokens it reused; None: its client names no session."""
    named = {} if session is None else {"user": session}
    body = chat(MID.name, *messages, max_tokens=4, stream=True, stream_options={"include_usage": True}, **named)
    began, first, cached = time.perf_counter(), 0.0, 0
    async with proxy.client.stream("POST", "/v1/chat/completions", json=body, timeout=300) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            first = first or time.perf_counter() - began
            if line.startswith("data: {") and (usage := json.loads(line[6:]).get("usage")):
                cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        return first, answer.headers["x-kvproxy-endpoint"], cached


def turn_of(session: str, turn: int, words: int = FIRST_WORDS) -> list[str]:
    """Return the chat up to this turn."""
    messages = [text(words, seed=session)]
    for number in range(turn):
        messages += ["Yes.", text(MORE_WORDS, seed=f"{session} {number}")]
    return messages


async def play_sessions(
    proxy: RunningProxy, name: str, sessions: int, turns: int, *, named: bool, words: int
) -> list[dict[str, Any]]:
    """Every session's turns, one round of turns after the other, two requests at once."""
    rows, slots = [], asyncio.Semaphore(2)

    async def one(session: str, turn: int) -> None:
        async with slots:
            messages = turn_of(session, turn, words)
            ttft_s, endpoint, cached = await first_token(proxy, session if named else None, messages)
        rows.append({"session": session, "turn": turn, "ttft_s": ttft_s, "endpoint": endpoint, "cached": cached})

    for turn in range(turns):
        await asyncio.gather(*(one(f"{name} {number}", turn) for number in range(sessions)))
    return rows


async def compare_awareness(tiers: Tiers, args: argparse.Namespace, *, named: bool, words: int) -> list[dict[str, Any]]:
    """Repeats of both arms, in turn; clients that name their sessions or not; words of a first message."""
    arms = {BLIND: {"kv_events": True}, AWARE: tiers.kvcache}
    found = []
    for repeat in range(args.repeats):
        for arm in (BLIND, AWARE) if repeat % 2 == 0 else (AWARE, BLIND):
            tiers.pair.forget()
            async with running_proxy(tiers.endpoints, filters=with_kvcache(**arms[arm]), policy="kv_aware") as proxy:
                name = f"{arm} {repeat} {time.time()}"
                rows = await play_sessions(proxy, name, args.sessions, args.turns, named=named, words=words)
            found += [{"arm": arm, "repeat": repeat, **row} for row in rows]
            later = [row["ttft_s"] for row in rows if row["turn"]]
            cached = statistics.mean(row["cached"] for row in rows if row["turn"])
            say(f"{arm}, repeat {repeat}: later turns' mean TTFT {statistics.mean(later):.3f} s, {cached:.0f} cached")
    return found


def mean_of(rows: Sequence[dict[str, Any]], arm: str, repeat: int | None, first: int, figure: str = "ttft_s") -> float:
    chosen = [row[figure] for row in rows
              if row["arm"] == arm and row["turn"] >= first and repeat in (None, row["repeat"])]  # fmt: skip
    return float(statistics.mean(chosen))


def mean_rows(rows: Sequence[dict[str, Any]], before: str, after: str, first: int) -> Iterator[list[str]]:
    """Mean TTFT of two arms and their ratio, of each repeat and of all together."""
    for repeat in (*sorted({row["repeat"] for row in rows}), None):
        one, other = (mean_of(rows, arm, repeat, first) for arm in (before, after))
        name = "all" if repeat is None else f"repeat {repeat + 1}"
        yield [f"{name}: mean TTFT", f"{one:.2f} s", f"{other:.2f} s", f"{other / one:.2f}"]


def awareness(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the table of both arms."""
    cached = [f"{mean_of(rows, arm, None, 1, 'cached'):.0f}" for arm in (BLIND, AWARE)]
    means = [*mean_rows(rows, BLIND, AWARE, 1), ["tokens reused of a prompt, mean", *cached, ""]]
    return table(["later turns", "blind", "aware", "aware / blind"], means)


def verdict_on(rows: Sequence[dict[str, Any]]) -> str:
    """Return whether the ratio is within the target, as text."""
    ratio = mean_of(rows, AWARE, None, 1) / mean_of(rows, BLIND, None, 1)
    return f"{'reached' if ratio <= _TARGET else '**missed**'} ({ratio:.2f})"


def as_markdown(rows: dict[str, list[dict[str, Any]]], command: str) -> str:
    """Render the report."""
    lines = ["# Tiers on real engines", "",
             f"`{command}`. Two vLLM 0.32 (CPU, one core each, 10,240 tokens of cache of their own, a random model of "
             "102 M parameters), an LMCache 0.5.6 server beside each, LMCache's coordinator; other work on the same "
             "two cores. Seconds of one run say little, ratios within it more. Arms take turns.", "",
             "## Knowing of host memory", "",
             "Chats of about 5,000 tokens that grow by 200 a turn, two requests at once, host memory of 1 GB beside "
             "each engine, no shared store. *Blind*: the engines' KV events alone, which tell of their own memory. "
             "*Aware*: the coordinator's directory too. Policy kv_aware in both."]  # fmt: skip
    aware = rows["aware"]
    lines += awareness(aware)
    lines += [
        "",
        f"Target {_TARGET}: {verdict_on(aware)}. Of two engines a blind choice is every other time the one "
        "that has it, so that blind turns reuse most of their prompt too.",
        "",
        "Chats of about 9,000 tokens, where computing again costs more beside all else that a turn takes:",
    ]
    lines += awareness(rows["long"])
    lines += ["", f"Target {_TARGET}: {verdict_on(rows['long'])}.", "",
              "With clients that name their sessions (`user`) the blind arm knows where each was served last, which is "
              "where host memory has it:"]  # fmt: skip
    lines += awareness(rows["named"])
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sessions", type=int, default=10)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--parts", default=",".join(PARTS), help="what is measured anew (default: all)")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "reports", help="folder of the report")
    args = parser.parse_args()
    kept = args.out / "real-tiers.json"
    rows = json.loads(kept.read_text()) if kept.exists() else {}
    parts = args.parts.split(",")
    for part in [one for one in ("aware", "long", "named") if one in parts]:
        words = LONG_WORDS if part == "long" else FIRST_WORDS
        with running_tiers(say, shared=None, memory_gb=1, tells_tokens=False) as tiers:
            rows[part] = asyncio.run(compare_awareness(tiers, args, named=part == "named", words=words))
    command = "python -m benchmarks.real_tiers" + (f" --repeats {args.repeats}" if args.repeats != 3 else "")
    kept.write_text(json.dumps(rows) + "\n")
    if rows.keys() != set(PARTS):
        return
    report = as_markdown(rows, command)
    (args.out / "real-tiers.md").write_text(report)
    say(report)


if __name__ == "__main__":
    main()
