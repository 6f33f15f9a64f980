"""Tables of `engine_priority`'s results for people, and JSON."""

from __future__ import annotations

import json
import math
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

_Runs = Sequence[Mapping[str, Any]]
_Requests = Sequence[Mapping[str, float]]

#: Under so many tokens a prompt is one of the short ones.
_SHORT_BELOW = 1000


def write(folder: Path, measured: Mapping[str, Any], *, modes: Sequence[str], load: float, scheduling: str) -> None:
    """engine-priority.md and engine-priority.json in `folder`; the tables are printed as well."""
    folder.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["python", "-m", "benchmarks.engine_priority", *sys.argv[1:]])
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    document = {"command": command, "machine": machine, "load": load, "scheduling": scheduling, "slots": measured}
    (folder / "engine-priority.json").write_text(json.dumps(document, indent=1) + "\n")
    lines = [
        "# A real vLLM told in which order to admit",
        "",
        f"`{command}`",
        "",
        f"{machine} shared by one vLLM 0.32.0 server (CPU build, a core, `--scheduling-policy {scheduling}`), the "
        "proxies and the clients. Unique prompts, 70 % of about 200 and 30 % of about 3,000 tokens, answers of 8 "
        f"tokens, open loop at {load:g} of the rate the engine took them at when all came at once. The modes of "
        "`engine_priority` take turns on the same arrivals and lengths, through one proxy each. TTFT in seconds, as "
        "the client sees it. Of so few requests a run p99 is next to the longest.",
    ]
    for slots, one in measured.items():
        lines += ["", *_slots(slots, one, modes)]
    words = "\n".join(lines) + "\n"
    (folder / "engine-priority.md").write_text(words)
    print(words)


def _slots(slots: str, measured: Mapping[str, Any], modes: Sequence[str]) -> Iterator[str]:
    runs: _Runs = measured["runs"]
    yield f"## {slots.capitalize()} slots"
    yield ""
    yield f"{measured['arrivals_per_s']:.2f} requests a second."
    yield ""
    yield "| repeat | mode | mean TTFT | p50 | p99 | short prompts | long prompts | mean e2e |"
    yield "|---|---|---|---|---|---|---|---|"
    repeats = sorted({run["repeat"] for run in runs})
    for repeat in repeats:
        for mode in modes:
            yield _row(str(repeat + 1), mode, _requests(runs, mode, {repeat}))
    for mode in modes:
        yield _row("all", mode, _requests(runs, mode, set(repeats)))
    yield ""
    yield from _ratios(runs, modes, repeats)
    for mode in modes:
        said = measured["engine_priority"][mode]
        if said is not None:
            sends = "sends" if said["sends"] else "does not send"
            yield ""
            yield f"In the end the proxy with `{mode}` says of the engine: {said['state']}; it {sends} it."


def _row(repeat: str, mode: str, requests: _Requests) -> str:
    ttfts = [one["ttft_s"] for one in requests]
    short = [one["ttft_s"] for one in requests if one["tokens"] < _SHORT_BELOW]
    long = [one["ttft_s"] for one in requests if one["tokens"] >= _SHORT_BELOW]
    e2e = statistics.fmean(one["e2e_s"] for one in requests)
    figures = [statistics.fmean(ttfts), statistics.median(ttfts), p99(ttfts)]
    figures += [statistics.fmean(short), statistics.fmean(long), e2e]
    return f"| {repeat} | {mode} | " + " | ".join(f"{figure:.2f}" for figure in figures) + " |"


def _ratios(runs: _Runs, modes: Sequence[str], repeats: Sequence[int]) -> Iterator[str]:
    """Of each mode against the first, by repeat and their geometric mean."""
    base, *others = modes
    kinds: Mapping[str, Callable[[Sequence[float]], float]] = {"mean": statistics.fmean, "p99": p99}
    for mode in others:
        for name, of in kinds.items():
            each = [
                of([one["ttft_s"] for one in _requests(runs, mode, {repeat})])
                / of([one["ttft_s"] for one in _requests(runs, base, {repeat})])
                for repeat in repeats
            ]
            whole = math.exp(statistics.fmean(map(math.log, each)))
            by_repeat = ", ".join(f"{ratio:.2f}" for ratio in each)
            yield f"- {name} TTFT, {mode} / {base}: **{whole:.2f}** (by repeat: {by_repeat})"


def _requests(runs: _Runs, mode: str, repeats: set[int]) -> list[Mapping[str, float]]:
    return [one for run in runs if run["mode"] == mode and run["repeat"] in repeats for one in run["requests"]]


def p99(values: Sequence[float]) -> float:
    """Return the 99th percentile by nearest rank."""
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]
