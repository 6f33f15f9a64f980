"""Table of `real_engines`' results for people, and JSON."""

from __future__ import annotations

import json
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_Run = Mapping[str, Any]


def write(folder: Path, runs: Sequence[_Run], *, shape: Mapping[str, int], policies: Sequence[str]) -> None:
    """real-engines.md and real-engines.json in `folder`; the table is printed as well."""
    folder.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["python", "-m", "benchmarks.real_engines", *sys.argv[1:]])
    document = {"command": command, "machine": _machine(), "shape": shape, "runs": runs}
    (folder / "real-engines.json").write_text(json.dumps(document, indent=1) + "\n")
    words = "\n".join(_lines(runs, shape, policies, command)) + "\n"
    (folder / "real-engines.md").write_text(words)
    print(words)


def _lines(runs: Sequence[_Run], shape: Mapping[str, int], policies: Sequence[str], command: str) -> list[str]:
    prompt = statistics.median(turn["prompt_tokens"] for run in runs for turn in run["turns"])
    lines = [
        "# Two real vLLM servers, growing chats",
        "",
        f"`{command}`",
        "",
        f"{_machine()} shared by two vLLM 0.32.0 servers (CPU build, a core each), the proxy and the clients. "
        f"{shape['sessions']} sessions of {shape['turns']} turns, each with a system prompt of its own, "
        f"{shape['clients']} clients at once, half of the prompts over {prompt:.0f} tokens, answers of "
        f"{shape['answer_tokens']} tokens. Policies interleaved on the same prompts, caches emptied in between. "
        "TTFT in milliseconds, as the client sees it; cached: the engines' own count.",
        "",
        "| repeat | policy | later turns p50 | mean | p90 | first turns p50 | later turns cached | whole run, s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    repeats = sorted({run["repeat"] for run in runs})
    for repeat in repeats:
        lines += [_row(str(repeat + 1), policy, _of(runs, policy, {repeat})) for policy in policies]
    lines += [_row("all", policy, _of(runs, policy, set(repeats))) for policy in policies]
    return [*lines, "", *_ratios(runs, policies, set(repeats))]


def _row(repeat: str, policy: str, runs: Sequence[_Run]) -> str:
    turns = [turn for run in runs for turn in run["turns"]]
    seconds = statistics.fmean(run["seconds"] for run in runs)
    later, first = _ttft_ms(turns, later=True), _ttft_ms(turns, later=False)
    figures = (statistics.median(later), statistics.fmean(later), _percentile(later, 0.9), statistics.median(first))
    told = " | ".join(f"{figure:.0f}" for figure in figures)
    grown = [turn for turn in turns if turn["turn"] > 1]
    cached = sum(turn["cached_tokens"] for turn in grown) / sum(turn["prompt_tokens"] for turn in grown)
    return f"| {repeat} | {policy} | {told} | {cached:.0%} | {seconds:.0f} |"


def _ratios(runs: Sequence[_Run], policies: Sequence[str], repeats: set[int]) -> list[str]:
    """Mean TTFT of later turns against the first policy's, over everything and by repeat."""
    base, *others = policies

    def mean(policy: str, of: set[int]) -> float:
        turns = [turn for run in _of(runs, policy, of) for turn in run["turns"]]
        return statistics.fmean(_ttft_ms(turns, later=True))

    lines = []
    for policy in others:
        each = ", ".join(f"{mean(policy, {repeat}) / mean(base, {repeat}):.2f}" for repeat in sorted(repeats))
        whole = mean(policy, repeats) / mean(base, repeats)
        lines.append(f"Mean TTFT of later turns, {policy} / {base}: **{whole:.2f}** (by repeat: {each}).")
    return lines


def _of(runs: Sequence[_Run], policy: str, repeats: set[int]) -> list[_Run]:
    return [run for run in runs if run["policy"] == policy and run["repeat"] in repeats]


def _ttft_ms(turns: Sequence[Mapping[str, Any]], *, later: bool) -> list[float]:
    return [turn["ttft_s"] * 1000 for turn in turns if (turn["turn"] > 1) is later]


def _percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def _machine() -> str:
    return f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
