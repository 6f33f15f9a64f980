"""The data plane's figures as a table for people and as JSON, with ratios to one peer."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

BASELINE = "vllm-router round_robin"


def write(
    folder: Path,
    results: Mapping[str, Mapping[str, Any]],
    *,
    memory: Mapping[str, Mapping[str, float]],
    skipped: Mapping[str, str],
    cores: int,
) -> None:
    """data-plane.md and data-plane.json in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    raw = {name: {case: asdict(sample) for case, sample in cases.items()} for name, cases in results.items()}
    document = {"machine": _machine(cores), "results": raw, "memory": memory, "skipped": skipped}
    (folder / "data-plane.json").write_text(json.dumps(document, indent=1) + "\n")
    text = "\n".join(_lines(results, memory, skipped, cores)) + "\n"
    (folder / "data-plane.md").write_text(text)


def _lines(
    results: Mapping[str, Mapping[str, Any]],
    memory: Mapping[str, Mapping[str, float]],
    skipped: Mapping[str, str],
    cores: int,
) -> list[str]:
    lines = ["# Data plane", "", _machine(cores) + ". Medians; the ratio in brackets is to " + BASELINE + ".", ""]
    cases = list(next(iter(results.values())))
    for case in cases:
        stream = "events" in case
        unit = "CPU us/event" if stream else "CPU ms/request"
        lines += [f"## {case}", "", f"| | per second | {unit} | p50 ms | errors |", "|---|---|---|---|---|"]
        base = results.get(BASELINE, {}).get(case)
        for name, samples in results.items():
            lines.append(_row(name, samples[case], base, stream=stream))
        lines.append("")
    lines += _added(results, cases[0]) + (_memory(memory) if memory else [])
    lines += [f"- {name}: not measured, {why}" for name, why in skipped.items()]
    return lines


def _row(name: str, sample: Any, base: Any, *, stream: bool) -> str:
    cpu = sample.cpu_us_event if stream else sample.cpu_ms
    base_cpu = (base.cpu_us_event if stream else base.cpu_ms) if base else 0.0
    shown = f"{cpu:.3g}{_ratio(cpu, base_cpu)}" if cpu else "-"
    rate = f"{sample.rate:.0f}{_ratio(sample.rate, base.rate if base else 0.0)}"
    return f"| {name} | {rate} | {shown} | {sample.p50_ms:.2f} | {sample.errors} |"


def _added(results: Mapping[str, Mapping[str, Any]], case: str) -> list[str]:
    direct = results["direct"][case].p50_ms
    base = results.get(BASELINE, {}).get(case)
    base_ms = base.p50_ms - direct if base else 0.0
    lines = [f"## Added p50 at one connection (2 KB; direct {direct:.3f} ms)", "", "| | ms |", "|---|---|"]
    for name, samples in results.items():
        if name != "direct":
            added = samples[case].p50_ms - direct
            lines.append(f"| {name} | {added:.3f}{_ratio(added, base_ms)} |")
    return [*lines, ""]


def _memory(memory: Mapping[str, Mapping[str, float]]) -> list[str]:
    lines = [
        "## Memory (MB)",
        "",
        "| | at rest | 1 000 open streams | grown | over requests |",
        "|---|---|---|---|---|",
    ]
    for name, held in memory.items():
        requests = f"{held['grown_over_requests']:.0f}"
        lines.append(
            f"| {name} | {held['rest_mb']:.0f} | {held['open_streams_mb']:.0f} | {held['grown_mb']:.1f} | {requests} |"
        )
    return [*lines, ""]


def _ratio(value: float, base: float) -> str:
    return f" ({value / base:.2f}x)" if base > 0 else ""


def _machine(cores: int) -> str:
    return f"{platform.machine()}, {cores} cores, Linux {platform.release()}, Python {platform.python_version()}"
