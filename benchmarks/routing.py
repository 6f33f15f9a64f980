"""Routing policies on request traces and named scenarios, in virtual time.

    python -m benchmarks.routing [--quick] [--jobs N] [--nice N] [--minutes N]

Every cell is one run of `kvproxy replay`; finished ones are kept in .bench/routing.jsonl (with a fingerprint of the
code they depend on), so that a run that was interrupted goes on where it was. Writes routing.md and routing.json of
benchmarks/reports.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks import routing_report
from benchmarks.routing_cells import ROOT, Cell, cells, run_cell

REFERENCE_DEPENDS_ON = (
    *(f"kvproxy/lab/replay/{name}.py" for name in ("pooled", "trace", "scenarios", "settings", "results")),
    *(f"kvproxy/lab/simulator/{name}.py" for name in ("block_cache", "engine", "engine_io", "scheduler", "timing")),
    "benchmarks/routing_cells.py",
)
DEPENDS_ON = (
    "kvproxy/cluster/routing",
    "kvproxy/cache/overlap/merge.py",
    "kvproxy/cache/overlap/index_state.py",
    "kvproxy/cache/overlap/local_indexes.py",
    "kvproxy/cache/overlap/prompt_hashes.py",
    "kvproxy/lab/replay",
    "kvproxy/cache/prefix",
    "kvproxy/cache/indexes",
    "kvproxy/features/published",
    "kvproxy/lab/simulator",
    *REFERENCE_DEPENDS_ON,
)
_NAMES = [each.name for each in fields(Cell)]

#: Written by hand after the run whose report is committed.
NOTES = Path(__file__).parent / "routing_notes.md"


def fingerprint(places: Sequence[str]) -> str:
    """Of the code the figures depend on: files, and folders with all that is in them."""
    digest = hashlib.sha256()
    for place in places:
        for path in sorted((ROOT / place).rglob("*.py")) or [ROOT / place]:
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def known_results(path: Path, version: str) -> dict[Cell, dict[str, Any]]:
    """Return the results of earlier runs of the same code."""
    found = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        row = json.loads(line)
        if row.pop("version") == version:
            found[Cell(*(row[name] for name in _NAMES))] = row
    return found


def run_missing(wanted: Sequence[Cell], work: Path, *, jobs: int, minutes: float) -> list[dict[str, Any]]:
    """Return the figures of every cell that was run, in order; after `minutes` no further one is begun."""
    version, path = fingerprint(DEPENDS_ON), work / "routing.jsonl"
    results = known_results(path, version)
    missing = [cell for cell in wanted if cell not in results]
    groups = [list(group) for _, group in groupby(missing, key=lambda cell: replace(cell, policy=""))]
    job = _Job(work, fingerprint(REFERENCE_DEPENDS_ON), time.time() + 60 * minutes)
    with multiprocessing.get_context("spawn").Pool(jobs) as pool, path.open("a") as kept:
        for done, rows in enumerate(pool.imap_unordered(job, groups), start=1):
            for row in rows:
                results[Cell(*(row[name] for name in _NAMES))] = row
                kept.write(json.dumps({**row, "version": version}) + "\n")
            kept.flush()
            print(f"\r{done}/{len(groups)} groups of cells", end="", file=sys.stderr, flush=True)
    return [results[cell] for cell in wanted if cell in results]


class _Job:
    """Runs cells that share a reference in another process, those for which it is not too late."""

    def __init__(self, work: Path, version: str, deadline: float) -> None:
        self._work, self._version, self._deadline = work, version, deadline

    def __call__(self, group: Sequence[Cell]) -> list[dict[str, Any]]:
        return [run_cell(cell, self._work, self._version) for cell in group if time.time() < self._deadline]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="8 instances at loads 0.7 and 0.9 and scenarios, once")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--nice", type=int, default=0, help="give way to other work this much (default 0)")
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no run after so many")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "reports", help="folder of the report")
    args = parser.parse_args()
    os.nice(args.nice)
    work = ROOT / ".bench"
    work.mkdir(exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)
    wanted = cells(quick=args.quick)
    rows = run_missing(wanted, work, jobs=args.jobs, minutes=args.minutes)
    command = "python -m benchmarks.routing" + (" --quick" if args.quick else "")
    document = {"command": command, "half": "report", "wanted": len(wanted), "runs": rows}
    (args.out / "routing.json").write_text(json.dumps(document) + "\n")
    text = routing_report.as_markdown(rows, command=command, wanted=len(wanted)) + NOTES.read_text()
    (args.out / "routing.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
