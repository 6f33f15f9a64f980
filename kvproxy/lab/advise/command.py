"""`kvproxy doctor --advise`: the settings that would help the recorded traffic, as text for a terminal and as JSON."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from kvproxy.base.types import utc_seconds
from kvproxy.lab.advise.advice import Advice, Fit, Gain, Ratio
from kvproxy.lab.advise.adviser import Adviser, PoolAdvice
from kvproxy.lab.advise.engines import EngineSettingsSeen, ask_engines
from kvproxy.lab.advise.traffic import Traffic
from kvproxy.lab.replay.command import INTERRUPTED
from kvproxy.operate.commands.doctor import DoctorOptions, budget_of, duration_of, load_configuration, read_options
from kvproxy.operate.commands.serving import run_loop
from kvproxy.operate.doctor.check_configuration import convert_problems
from kvproxy.operate.doctor.report import DoctorReport, print_table
from kvproxy.operate.doctor.tools import Tools, VisitTimeouts
from kvproxy.operate.receipts.receipt import describe_media, media_share

_MARGIN = "    "


def as_dict(pools: Sequence[PoolAdvice], notes: Sequence[str], *, now: float) -> dict[str, Any]:
    """For JSON; see docs/doctor.md."""
    return {
        "at": datetime.fromtimestamp(now, UTC).isoformat(timespec="seconds"),
        "notes": list(notes),
        "pools": [_pool_dict(pool) for pool in pools],
    }


def _pool_dict(pool: PoolAdvice) -> dict[str, Any]:
    traffic = pool.traffic
    fit = pool.fit
    return {
        "name": pool.name,
        "engines": [
            {"id": one.id, "kind": one.kind, "version": one.version, "error": one.error} for one in pool.engines
        ],
        "requests": len(traffic.requests) if traffic else 0,
        "span_s": traffic.span_s if traffic else 0.0,
        "media_share": media_share(traffic.receipts) if traffic else 0.0,
        "today": pool.today.describe() if pool.today else None,
        "model": None if fit is None else {**asdict(fit), "error": fit.error, "fits": fit.good},
        "advice": [_advice_dict(one) for one in pool.advice],
        "not_given": [
            {"setting": one.setting, "what": one.what, "gain": asdict(one.gain), "reason": one.reason}
            for one in pool.not_given
        ],
        "notes": list(pool.notes),
    }


def _advice_dict(one: Advice) -> dict[str, Any]:
    return {
        "setting": one.setting,
        "what": one.what,
        "flags": [{"engines": engines, "flag": flag} for engines, flag in one.flags],
        "config": one.config,
        "gain": None if one.gain is None else asdict(one.gain),
    }


def print_json(pools: Sequence[PoolAdvice], notes: Sequence[str], out: TextIO, *, now: float) -> None:
    """One object."""
    print(json.dumps(as_dict(pools, notes, now=now), indent=2), file=out)


def print_text(
    pools: Sequence[PoolAdvice],
    notes: Sequence[str],
    out: TextIO,
    *,
    now: float,
    width: int = 100,
    colour: bool = False,
) -> None:
    """Pool by pool: what was looked at, what is known, what is expected, what was tried in vain."""
    width = max(60, width)
    for line in (line for note in notes for line in _wrapped(f"note: {note}", width, "      ")):
        print(line, file=out)
    for number, pool in enumerate(pools):
        if number or notes:
            print(file=out)
        for line in _pool(pool, now, width, colour=colour):
            print(line, file=out)
    if pools:
        print("\nNothing was changed. Flags take effect when an engine starts anew.", file=out)


def _pool(pool: PoolAdvice, now: float, width: int, *, colour: bool) -> Iterator[str]:
    yield _bold(pool.name, colour=colour) + f": {_engines(pool.engines)}"
    if pool.traffic is not None:
        yield from _wrapped(_recorded(pool.traffic, now), width, "  ")
    if pool.today is not None:
        yield from _wrapped(f"  today: {pool.today.describe()}", width, _MARGIN)
    if pool.fit is not None:
        yield from _wrapped(f"  model: {describe_fit(pool.fit)}", width, _MARGIN)
    for note in pool.notes:
        yield from _wrapped(f"  note: {note}", width, _MARGIN)
    known = [one for one in pool.advice if one.gain is None]
    expected = [one for one in pool.advice if one.gain is not None]
    if known:
        yield from ("", "  Known, without a simulation:")
    for one in known:
        yield from _advice(one, width, colour=colour)
    if expected:
        yield from ("", "  Expected, by replay of the recorded requests:")
    for one in expected:
        yield from _advice(one, width, colour=colour)
    if not pool.advice:
        yield from ("", "  " + _nothing(pool))
    if pool.not_given:
        tried = "; ".join(f"{one.what}: {_percent(one.gain.ttft_mean)} ({one.reason})" for one in pool.not_given)
        yield ""
        yield from _wrapped(f"  Simulated and not recommended (mean TTFT): {tried}.", width, _MARGIN)


def _nothing(pool: PoolAdvice) -> str:
    if pool.fit is None or not pool.fit.good:
        return "No setting is known to help; nothing was simulated."
    return "Nothing helps beyond noise: these settings fit this traffic."


def _advice(one: Advice, width: int, *, colour: bool) -> Iterator[str]:
    yield ""
    what = f"{one.what[0].upper()}{one.what[1:]}."
    lines = _wrapped(what, width, _MARGIN)
    lines[0] = _MARGIN + lines[0].strip()
    yield from (_bold(line, colour=colour) for line in lines)
    if one.gain is not None:
        yield from _wrapped(_MARGIN + describe_gain(one.gain), width, _MARGIN)
    for engines, flag in one.flags:
        yield f"{_MARGIN}  {engines}:"
        yield f"{_MARGIN}    {flag}"  # never wrapped: it is to be copied
    if one.config:
        yield f"{_MARGIN}  kvproxy:"
        yield f"{_MARGIN}    {one.config}"


def describe_gain(gain: Gain) -> str:
    """Return what it does to each figure, and how sure that is."""
    figures = ", ".join(
        f"{name} {_percent(ratio)}"
        for name, ratio in (("mean TTFT", gain.ttft_mean), ("p99", gain.ttft_p99), ("ITL p99", gain.itl_p99))
    )
    at_most = "at most " if gain.at_most else ""
    return f"{at_most}{figures}; confidence {gain.confidence} ({gain.runs} runs)"


def describe_fit(fit: Fit) -> str:
    """How well today's settings, simulated, agree with what was measured."""
    text = f"mean TTFT {fit.simulated_ttft_s:.3g} s, measured {fit.measured_ttft_s:.3g} s ({abs(fit.error):.0%} off)"
    if fit.measured_hit is not None:
        text += f"; {fit.simulated_hit:.0%} of prompt tokens cached, measured {fit.measured_hit:.0%}"
    return text + f"; {fit.requests:,} requests of {fit.span_s / 60:.0f} min played"


def _percent(ratio: Ratio) -> str:
    return f"{ratio.value - 1.0:+.0%} (±{ratio.value * ratio.spread * 100:.0f})"


def _engines(engines: Sequence[EngineSettingsSeen]) -> str:
    kinds: dict[str, int] = {}
    for one in engines:
        name = "not reached" if one.error else f"{one.kind} {one.version}".strip()
        kinds[name] = kinds.get(name, 0) + 1
    return (
        ", ".join(f"{count} engine{'s' if count > 1 else ''} ({name})" for name, count in kinds.items()) or "no engine"
    )


def _recorded(traffic: Traffic, now: float) -> str:
    ago_s = max(0.0, now - traffic.latest_at)
    ago = f"{ago_s / 86_400:.0f} days" if ago_s > 2 * 86_400 else f"{ago_s / 60:.0f} min"
    minutes = f"{traffic.span_s / 60:.0f} min"
    media = describe_media(media_share(traffic.receipts))
    recorded = f"  recorded: {len(traffic.requests):,} answered requests in {minutes}, the last one {ago} ago"
    return f"{recorded}; {media}" if media else recorded


def _bold(text: str, *, colour: bool) -> str:
    return f"\x1b[1m{text}\x1b[0m" if colour else text


def _wrapped(text: str, width: int, margin: str) -> list[str]:
    indent = text[: len(text) - len(text.lstrip())]
    return textwrap.wrap(
        text.strip(),
        width,
        initial_indent=indent,
        subsequent_indent=margin,
        break_long_words=False,
        break_on_hyphens=False,
    )


#: As a nice program, to leave the processor to others.
_NICE = 10


def main(args: argparse.Namespace) -> int:
    """`kvproxy doctor --advise`."""
    os.nice(_NICE)  # it often runs beside the proxy
    return print_advice(read_options(args), out=sys.stdout, err=sys.stderr)


def print_advice(options: DoctorOptions, *, out: TextIO, err: TextIO) -> int:
    """Print advice; 0, 1 when the configuration has errors, 130 when Ctrl-C ended it early."""
    timeout_s = duration_of("--timeout", options.timeout)
    budget_s = budget_of(options.budget)
    config, problems = load_configuration(options)
    if config is None:
        print_table(DoctorReport.of_findings(convert_problems(problems)), out)
        return 1
    tools = Tools(timeouts=VisitTimeouts(exchange_s=timeout_s))
    engines: list[EngineSettingsSeen] = []

    async def visit() -> int:
        engines.extend(await ask_engines(config, tools=tools))
        return 0

    run_loop(visit)
    path = options.receipts or (Path(config.receipts.path) if config.receipts.path else None)
    adviser = Adviser(config, engines, path, budget_s=budget_s, now=utc_seconds(), err=err)
    pools = adviser.advise()
    if options.as_json:
        print_json(pools, adviser.notes, out, now=adviser.now)
    else:
        width = shutil.get_terminal_size().columns
        colour = out.isatty() and "NO_COLOR" not in os.environ
        print_text(pools, adviser.notes, out, now=adviser.now, width=width, colour=colour)
    return INTERRUPTED if adviser.interrupted else 0
