"""Benchmarks that play request traces in virtual time, a process a trace: their command line and their report."""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.routing_cells import ROOT, TRACES

Rows = Sequence[dict[str, Any]]


def measure_traces(
    about: str,
    *,
    job: Callable[..., Callable[[str], Rows]],
    as_markdown: Callable[[Rows, str], str],
    traces: Sequence[str] = TRACES,
    **numbers: int,
) -> None:
    """Run a module's measurement, whose docstring is `about`: play, print, write NAME.md and NAME.json. `numbers` are
    the job's arguments with their defaults, each a flag of the command line (`requests`: of each trace at most)."""
    name = about.partition("python -m benchmarks.")[2].split()[0]
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    for number, default in numbers.items():
        parser.add_argument(f"--{number}", type=int, default=default, help=f"(default {default})")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--traces", default=",".join(traces), help="of benchmarks/traces (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "reports", help="folder of the report")
    args = parser.parse_args()
    given = {number: getattr(args, number) for number in numbers}
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        rows = [row for group in pool.imap(job(**given), args.traces.split(",")) for row in group]
    flags = [f"--{number} {value}" for number, value in given.items() if value != numbers[number]]
    command = " ".join([f"python -m benchmarks.{name}", *flags])
    (args.out / f"{name}.json").write_text(json.dumps({"command": command, "runs": rows}) + "\n")
    text = as_markdown(rows, command)
    (args.out / f"{name}.md").write_text(text)
    print(text)


def ratio_row(what: str, ratios: Sequence[float], target: float | None = None) -> list[str]:
    """Of a table: the ratio on each trace, their geometric mean, and whether it is what was wanted."""
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    verdict = "-"
    if target is not None:
        percent = 100 * (mean / target - 1)
        reached = (
            "reached" if mean <= target else f"**missed by {'less than 1' if percent < 0.5 else f'{percent:.0f}'} %**"
        )
        verdict = f"{target:.2f}: {reached}"
    return [what, *(f"{value:.2f}" for value in ratios), f"**{mean:.2f}**", verdict]
