"""Targets of the data plane against the results of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

OURS, OURS_AWARE = "kvproxy round_robin", "kvproxy kv_aware"
THEIRS, THEIRS_AWARE, SGLANG_AWARE = "vllm-router round_robin", "vllm-router cache_aware", "sglang-router cache_aware"
#: Loads, whose CPU per request kv_aware's is compared with, and the most it may be of that.
CPU_OF_AWARE = (
    ("2 KB, each new, 32", THEIRS_AWARE, 1.0),
    ("64 KB, each new, 32", SGLANG_AWARE, 1.0),
    ("256 KB, each new, 8", SGLANG_AWARE, 1.0),
    ("1 MB, each new, 4", SGLANG_AWARE, 1.0),
    ("agents, 35 to 180 KB, 8", SGLANG_AWARE, 0.9),
    ("agents, 35 to 180 KB, 8", THEIRS_AWARE, 0.15),
)

Results = Mapping[str, Mapping[str, Any]]


def rows(results: Results, memory: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return a table of those figures that this run has both sides of."""
    lines = [
        f"| {figure} | {target} | {measured} | {'yes' if met else '**no**'} |"
        for figure, target, measured, met in (*_speed(results), *_aware(results), *_memory(memory))
    ]
    return ["## Targets", "", "| figure | target | measured | met |", "|---|---|---|---|", *lines, ""] if lines else []


def _speed(results: Results) -> Iterator[tuple[str, str, str, bool]]:
    if not {OURS, THEIRS, "direct"} <= set(results):
        return
    ours, theirs, direct = results[OURS], results[THEIRS], results["direct"]
    share = ours["2 KB, 32"].cpu_ms / theirs["2 KB, 32"].cpu_ms
    yield f"CPU per request, 2 KB, to {THEIRS}'s", "at most 1.0x", f"{share:.2f}x", share <= 1.0
    for case in ("64 KB, 32", "64 events at once, 32"):
        gain = ours[case].rate / theirs[case].rate
        yield f"rate, {case}, to its", "at least 1.3x", f"{gain:.2f}x", gain >= 1.3
    one = "2 KB, 1 connection"
    added = (ours[one].p50_ms - direct[one].p50_ms) / (theirs[one].p50_ms - direct[one].p50_ms)
    yield "added p50 at one connection, to its", "at most 1.1x", f"{added:.2f}x", added <= 1.1
    for size in ("2 KB", "64 KB"):
        kept, errors = ours[f"{size}, 256"].rate / ours[f"{size}, 32"].rate, ours[f"{size}, 256"].errors
        text = f"{kept:.2f}x, {errors} errors"
        yield f"rate at 256 connections to that at 32, {size}", "at least 0.7x", text, kept >= 0.7 and not errors


def _aware(results: Results) -> Iterator[tuple[str, str, str, bool]]:
    for case, peer, most in CPU_OF_AWARE:
        if {OURS_AWARE, peer} <= set(results) and case in results[OURS_AWARE]:
            share = results[OURS_AWARE][case].cpu_ms / results[peer][case].cpu_ms
            figure = f"CPU per request of kv_aware, {case}, to {peer}'s"
            yield figure, f"at most {most:g}x", f"{share:.2f}x", share <= most


def _memory(memory: Mapping[str, Mapping[str, float]]) -> Iterator[tuple[str, str, str, bool]]:
    held = memory.get(OURS)
    if held is None:
        return
    streams_mb = held["open_streams_mb"]  # all of it: what load before left behind counts too
    yield "memory with 1 000 open streams", "under 150 MB", f"{streams_mb:.0f} MB", streams_mb < 150
    requests = held["grown_over_requests"]
    text = f"{held['grown_mb']:.1f} MB over {requests:.0f} requests"
    yield "growth after 100 000 requests", "none (under 5 MB)", text, held["grown_mb"] < 5 and requests >= 100_000
