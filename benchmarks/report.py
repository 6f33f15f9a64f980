"""The data plane's figures as a table for people and as JSON, with ratios to one peer."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import targets
from benchmarks.peers import VENVS
from kvproxy import __version__

BASELINE = "vllm-router round_robin"

#: Written by hand after the run whose report is committed.
NOTES = Path(__file__).parent / "data_plane_notes.md"


def write(
    folder: Path,
    results: Mapping[str, Mapping[str, Any]],
    *,
    memory: Mapping[str, Mapping[str, float]],
    skipped: Mapping[str, str],
    about: Mapping[str, str],
) -> None:
    """data-plane.md and data-plane.json in `folder`; the notes of the last run that was looked at go below."""
    folder.mkdir(parents=True, exist_ok=True)
    raw = {name: {case: asdict(sample) for case, sample in cases.items()} for name, cases in results.items()}
    document = {"about": about, "results": raw, "memory": memory, "skipped": skipped}
    (folder / "data-plane.json").write_text(json.dumps(document, indent=1) + "\n")
    text = "\n".join(_lines(results, memory, skipped, about)) + "\n"
    (folder / "data-plane.md").write_text(text + (NOTES.read_text() if NOTES.exists() else ""))


def about(cores: int, command: str) -> dict[str, str]:
    """Machine, command, and what was measured in which version."""
    commit = _output("git", "rev-parse", "--short", "HEAD")
    versions = {"kvproxy": f"{__version__} ({commit})", "nginx": _output("nginx", "-v").removeprefix("nginx version: ")}
    for name in ("vllm-router", "sglang-router", "litellm"):
        python = VENVS / name / "bin" / "python"
        code = f"import importlib.metadata as m; print(m.version({name!r}))"
        versions[name] = _output(str(python), "-c", code) if python.exists() else ""
    return {**machine(cores, command), **{name: version for name, version in versions.items() if version}}


def machine(cores: int, command: str) -> dict[str, str]:
    """Where and how something was measured."""
    return {
        "command": command,
        "machine": f"{platform.machine()}, {cores} cores",
        "Python": platform.python_version(),
        "load average before": " ".join(f"{load:.1f}" for load in os.getloadavg()),
    }


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return (done.stdout or done.stderr).strip()


def _lines(
    results: Mapping[str, Mapping[str, Any]],
    memory: Mapping[str, Mapping[str, float]],
    skipped: Mapping[str, str],
    about: Mapping[str, str],
) -> list[str]:
    lines = ["# Data plane", "", *(f"- {name}: {value}" for name, value in about.items()), ""]
    lines += [f"Medians; the ratio in brackets is to {BASELINE}.", "", *targets.rows(results, memory)]
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
