"""A replay's report as one HTML page: bars of mean TTFT and its distribution by policy, inline SVG, nothing loaded."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

from kvproxy.lab.replay.report import REFERENCE, ReplayReport, name_half

#: Distinguishable without hue too (lightness differs), on light and dark.
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#999999", "#b8a800")
_WIDTH = 760
_ROW = 30
_LABEL = 190
_CURVE_HEIGHT = 320
_MARGIN = 44
_POINTS = 200

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1c; --paper: #fff; --faint: #ccc; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8e8; --paper: #161616; --faint: #444; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  background: var(--paper); color: var(--ink); }
svg { max-width: 100%; height: auto; } text { fill: var(--ink); font-size: 13px; }
.axis { stroke: var(--faint); } pre { overflow-x: auto; }
"""


def render_html(report: ReplayReport, ttft_s: Mapping[str, Sequence[float]]) -> str:
    """Return the page of a replay. `ttft_s` holds every request's time to first token by policy, sorted."""
    means = {name: summary.ttft_mean_s for name, summary in report.policies.items()}
    reference_s = 0.0 if report.reference is None else report.reference.ttft_mean_s
    return render_page(
        f"{report.trace}, {name_half(report.half)}, {report.instances} instances, load {report.load:g}",
        {
            "Mean time to first token": draw_bars(means, "{:.3f} s", reference=reference_s),
            "Share of requests whose first token came within a time (seconds, logarithmic)": draw_curves(ttft_s),
            "Figures": f"<p>{html.escape(report.title())}</p>"
            + preformat(report.rows())
            + preformat(report.more_rows()),
        },
    )


def render_page(title: str, parts: Mapping[str, str]) -> str:
    """Parts, in HTML, by their headings."""
    title = html.escape(title)
    return "\n".join(
        (
            "<!doctype html>",
            f'<html lang="en"><head><meta charset="utf-8"><title>{title}</title>',
            f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>',
            f"<h1>{title}</h1>",
            *(f"<h2>{html.escape(heading)}</h2>\n{part}" for heading, part in parts.items()),
            "</body></html>\n",
        )
    )


def preformat(lines: Sequence[str]) -> str:
    """Return a table for a terminal."""
    return f"<pre>{html.escape(chr(10).join(lines))}</pre>"


def draw_bars(values: Mapping[str, float], shown: str, *, reference: float = 0.0) -> str:
    """Return a bar each, labelled as `shown` formats it; a line where the reference is, if there is one."""
    scale = (_WIDTH - _LABEL - 70) / max(*values.values(), reference, 1e-9)
    parts = []
    for row, (name, value) in enumerate(values.items()):
        y = row * _ROW
        parts.append(f'<text x="0" y="{y + 19}">{html.escape(name)}</text>')
        parts.append(f'<rect x="{_LABEL}" y="{y + 4}" width="{value * scale:.1f}" height="20" fill="{_colour(row)}"/>')
        parts.append(f'<text x="{_LABEL + value * scale + 6:.1f}" y="{y + 19}">{shown.format(value)}</text>')
    height = len(values) * _ROW
    if reference:
        x = _LABEL + reference * scale
        parts.append(f'<line x1="{x:.1f}" y1="0" x2="{x:.1f}" y2="{height}" class="axis" stroke-dasharray="4"/>')
        parts.append(f'<text x="{x:.1f}" y="{height + 16}" text-anchor="middle">{REFERENCE}</text>')
    return _svg(height + 24, "a bar each", parts)


def draw_curves(ttft_s: Mapping[str, Sequence[float]]) -> str:
    """How times are distributed, a curve each; the times sorted."""
    low = min((value for each in ttft_s.values() for value in each[:1] if value > 0), default=0.01)
    high = max((value for each in ttft_s.values() for value in each[-1:]), default=1.0)
    span = math.log(max(high, low) / low) or 1.0
    parts = [_share(quarter / 4) for quarter in range(5)]
    parts += [_tick(10.0**power, low, span) for power in range(math.ceil(math.log10(low)), 1 + int(math.log10(high)))]
    for row, (name, each) in enumerate(ttft_s.items()):
        points = " ".join(
            f"{_x(each[index], low, span):.1f},{_y((index + 1) / len(each)):.1f}" for index in _sampled(len(each))
        )
        colour = _colour(row)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{_MARGIN + 8}" y="{24 + 18 * row}" style="fill:{colour}">{html.escape(name)}</text>')
    return _svg(_CURVE_HEIGHT, "distribution of time to first token", parts)


def _tick(value: float, low: float, span: float) -> str:
    x = _x(value, low, span)
    bottom = _CURVE_HEIGHT - _MARGIN
    return (
        f'<line x1="{x:.1f}" y1="8" x2="{x:.1f}" y2="{bottom}" class="axis"/>'
        f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{value:g}</text>'
    )


def _share(share: float) -> str:
    y = _y(share)
    return (
        f'<line x1="{_MARGIN}" y1="{y:.1f}" x2="{_WIDTH - _MARGIN}" y2="{y:.1f}" class="axis"/>'
        f'<text x="{_MARGIN - 6}" y="{y + 5:.1f}" text-anchor="end">{share:.0%}</text>'
    )


def _sampled(count: int) -> list[int]:
    """Evenly spread indexes, the last included."""
    step = max(1, count // _POINTS)
    return [*range(0, count - 1, step), count - 1] if count else []


def _x(value: float, low: float, span: float) -> float:
    return _MARGIN + math.log(max(value, low) / low) / span * (_WIDTH - 2 * _MARGIN)


def _y(share: float) -> float:
    return 8 + (1.0 - share) * (_CURVE_HEIGHT - _MARGIN - 8)


def _colour(row: int) -> str:
    return _COLOURS[row % len(_COLOURS)]


def _svg(height: int, label: str, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{label}">{"".join(parts)}</svg>'
