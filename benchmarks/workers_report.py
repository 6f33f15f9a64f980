"""The figures of workers as a page."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

#: Written by hand after the run whose report is committed.
NOTES = Path(__file__).parent / "workers_notes.md"

_TEXT = """# Workers

{about}

One process against {count} workers of `kvproxy serve --workers {count}`, default chain with `kvcache`,
`policy: kv_aware`, 4 stub engines, requests of 2 KB in 500 conversations, {connections} connections. Load, engines and
proxy share the cores; medians of {rounds} rounds, in turn.

| | one process | {count} workers | ratio |
|---|---|---|---|
| requests a second | {rate_1:,.0f} | {rate_n:,.0f} | {rate:.2f} |
| CPU per request, all processes of the proxy | {cpu_1:.0f} us | {cpu_n:.0f} us | {cpu:.2f} |
| p50 | {p50_1:.1f} ms | {p50_n:.1f} ms | {p50:.2f} |
| errors | {errors_1} | {errors_n} | |
| connections by worker, in each round | | {shares} | |

## A worker that is killed

{streams} streams were under way, {its_own} of them at the worker that got SIGKILL. Broken: {broken}, all its own.
Until another one had taken its place, {back_s:.1f} s later, {asked} further requests were sent one after the other;
without answer: {refused}.

## How late the others know

| of the other worker | p50 | p99 |
|---|---|---|
{lags}
"""


def render(raw: Mapping[str, Any]) -> str:
    """Render the page, with the notes of the last reviewed run below."""
    (_, ones), (count, several) = sorted(raw["rates"].items(), key=lambda pair: int(pair[0]))
    one, more = (_medians(each) for each in (ones, several))
    text = _TEXT.format(
        about="\n".join(f"- {name}: {value}" for name, value in raw["about"].items()),
        count=count,
        connections=64,
        rounds=len(ones),
        **{f"{name}_1": value for name, value in one.items()},
        **{f"{name}_n": value for name, value in more.items()},
        **{name: _ratio(ones, several, name) for name in ("rate", "cpu", "p50")},
        shares="; ".join(" + ".join(map(str, each["shares"])) for each in several),
        **raw["killed"],
        lags="\n".join(
            f"| {each['origin']} | {_ms(each['lag_p50_s'])} | {_ms(each['lag_p99_s'])} |" for each in raw["lags"]
        ),
    )
    return text + (NOTES.read_text() if NOTES.exists() else "")


_FIELDS = {"rate": "rate", "cpu": "cpu_us", "p50": "p50_ms"}


def _medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    found = {name: statistics.median(each[field] for each in rounds) for name, field in _FIELDS.items()}
    return {**found, "errors": sum(each["errors"] for each in rounds)}


def _ratio(ones: Sequence[Mapping[str, float]], several: Sequence[Mapping[str, float]], name: str) -> float:
    pairs = zip(ones, several, strict=True)
    field = _FIELDS[name]
    return statistics.median(b[field] / a[field] for a, b in pairs)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"
