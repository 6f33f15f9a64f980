"""Table of scrapes' costs for people, and JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.report import machine
from benchmarks.scrape_page import Page

LIMIT = 0.02
INTERVALS_S = (1.0, 15.0)


@dataclass(frozen=True)
class Round:
    """One load with or without a scraper."""

    rate: float
    cpu_ms: float  # of the proxy, per request
    p50_ms: float
    p99_ms: float
    p999_ms: float
    errors: int
    scrapes: int


Pair = tuple[Round, Round]  # without and with a scraper, one after the other


@dataclass(frozen=True)
class Measured:
    """One proxy. `cpu_ms_a_scrape` is its CPU time for one scrape, sending included."""

    endpoints: int
    page_bytes: int
    cpu_ms_a_scrape: float
    saturated: Sequence[Pair]
    steady: Sequence[Pair]


TEXT = """# Scrapes of /metrics

{about}

The proxy with its default chain, `policy: kv_aware`, and 4 models on every endpoint. The limit: a scrape a second costs
less than {limit:.0%} of the throughput.

| endpoints | scrape every | share of a core | met |
|---|---|---|---|
{shares}

That is the CPU time of one scrape (of 100, beyond what the proxy uses at rest) by the time between two.

## One page

| endpoints | KB | series | ms in all | ms the event loop is held | ms it would be by prometheus_client's renderer |
|---|---|---|---|---|---|
{pages}

## Under load, without and with a scrape a second

Medians of {rounds} pairs of rounds, one after the other in turn. A ratio's range is that of the middle half of the
pairs: where it holds 1.00, the machine's own noise is larger than the cost. Load generator, engines and scraper share a
core, so reading the page is in these figures too. Where other programs use the machine (see the load average), the
proxy has a part of a core only, and a scrape takes more of that part than of a whole one.

| endpoints | load | requests/s | ratio | CPU ratio per request | p50 ms | p99 ms | added p99 ms | errors |
|---|---|---|---|---|---|---|---|---|
{loads}
"""


def about(cores: int, command: str) -> Mapping[str, str]:
    """Command and machine."""
    return machine(cores, command)


def write(folder: Path, pages: Sequence[Page], measured: Sequence[Measured], *, about: Mapping[str, str]) -> None:
    """scrape.md and scrape.json in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    document = {"about": about, "pages": [asdict(page) for page in pages], "measured": [asdict(m) for m in measured]}
    (folder / "scrape.json").write_text(json.dumps(document, indent=1) + "\n")
    text = TEXT.format(
        about="\n".join(f"- {name}: {value}" for name, value in about.items()),
        limit=LIMIT,
        rounds=len(measured[0].saturated),
        shares="\n".join(line for one in measured for line in _shares(one)),
        pages="\n".join(map(_page, pages)),
        loads="\n".join(_load(m, kind) for m in measured for kind in ("saturated", "steady")),
    )
    (folder / "scrape.md").write_text(text)


def _shares(one: Measured) -> Iterator[str]:
    for interval_s in INTERVALS_S:
        share = one.cpu_ms_a_scrape / 1e3 / interval_s
        met = "yes" if share < LIMIT else "**no**"
        yield f"| {one.endpoints} | {interval_s:.0f} s | {share:.2%} ({one.cpu_ms_a_scrape:.2f} ms a scrape) | {met} |"


def _page(page: Page) -> str:
    return (
        f"| {page.endpoints} | {page.page_bytes / 1e3:.0f} | {page.series} | {page.render_ms:.2f} | {page.held_ms:.2f} "
        f"| {page.library_ms:.1f} |"
    )


def _load(measured: Measured, kind: str) -> str:
    pairs = measured.saturated if kind == "saturated" else measured.steady
    quiet, scraped = ([pair[index] for pair in pairs] for index in (0, 1))
    rates = f"{_median(quiet, lambda r: r.rate):.0f} / {_median(scraped, lambda r: r.rate):.0f}"
    p50 = f"{_median(quiet, lambda r: r.p50_ms):.2f} / {_median(scraped, lambda r: r.p50_ms):.2f}"
    p99, added = "-", "-"
    if kind == "steady":
        p99 = f"{_median(quiet, lambda r: r.p99_ms):.2f} / {_median(scraped, lambda r: r.p99_ms):.2f}"
        added = f"{statistics.median(b.p99_ms - a.p99_ms for a, b in pairs):+.2f}"
    errors = sum(one.errors for pair in pairs for one in pair)
    ratios = f"{_ratio(pairs, lambda r: r.rate)} | {_ratio(pairs, lambda r: r.cpu_ms)}"
    return f"| {measured.endpoints} | {kind} | {rates} | {ratios} | {p50} | {p99} | {added} | {errors} |"


def _median(rounds: Sequence[Round], value: Callable[[Round], float]) -> float:
    return statistics.median(map(value, rounds))


def _ratio(pairs: Sequence[Pair], value: Callable[[Round], float]) -> str:
    ratios = sorted(value(with_) / value(without) for without, with_ in pairs)
    low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
    return f"{statistics.median(ratios):.3f} ({low:.3f} to {high:.3f})"
