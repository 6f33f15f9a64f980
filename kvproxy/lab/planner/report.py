"""A plan as text, as JSON and as a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvproxy.lab.planner.layers import KvLayers
from kvproxy.lab.planner.memory import Engine, Tier, find_cheapest
from kvproxy.lab.planner.models import Model
from kvproxy.lab.planner.traffic import Row, TrafficPlan, Wanted
from kvproxy.lab.replay.plot import draw_bars, draw_curves, preformat, render_page
from kvproxy.lab.replay.report import name_half, name_row
from kvproxy.operate.log_lines import align_columns

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class PlanReport:
    """Result of a plan. Without a trace there are no `rows`."""

    model: Model
    layers: KvLayers
    engine: Engine
    tiers: Sequence[Tier]
    traffic: TrafficPlan | None = None
    rows: Sequence[Row] = ()
    wanted: Wanted | None = None

    def render_text(self) -> str:
        """For a terminal of 100 columns."""
        lines = [*self._about(), "", *self._tier_rows()]
        if self.rows:
            lines += ["", self._traffic_title(), *self._traffic_rows(), *_LEGEND]
        if self.wanted is not None:
            lines += ["", self._cheapest()]
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """Return the same; sizes in bytes, times in seconds."""
        engine = self.engine
        layers = self.layers
        return {
            "model": self.model.name,
            "source": self.model.source,
            "kv_bytes_per_token": layers.bytes_per_token(engine.dtype),
            "kv_bytes_per_sequence": layers.bytes_of_sequence(engine.sequence_tokens, engine.dtype),
            "engine": asdict(engine),
            "tiers": [asdict(tier) for tier in self.tiers],
            "sizes": [{"share": row.share, "tokens": row.tokens, **asdict(row.summary)} for row in self.rows],
            "cheapest": self._cheapest() if self.wanted is not None else None,
        }

    def render_html(self) -> str:
        """Return the page of a plan with a trace."""
        names = {row.name: f"{row.name} ({row.tokens:,} tokens)" for row in self.rows}
        hits = {names[row.name]: row.summary.hit_rate for row in self.rows}
        means = {names[row.name]: row.summary.ttft_mean_s for row in self.rows}
        return render_page(
            f"{self.model.name}: {self._traffic_title()}",
            {
                "Share of prompt tokens found in cache, by cache an engine": draw_bars(hits, "{:.3f}"),
                "Mean time to first token": draw_bars(means, "{:.3f} s"),
                "Share of requests whose first token came within a time (seconds, logarithmic)": draw_curves(
                    {names[row.name]: row.ttft_s for row in self.rows}
                ),
                "Figures": preformat(self.render_text().splitlines()),
            },
        )

    def _about(self) -> list[str]:
        engine = self.engine
        dtype = self.engine.dtype
        token = self.layers.bytes_per_token(dtype)
        length = engine.sequence_tokens
        of_each = (
            f"{token:,.0f} bytes a token ({token / 1024:.1f} KiB)" if token else "nothing beyond its windows and states"
        )
        return [
            f"{self.model.name} ({self.model.source})",
            *(f"  {line}" for line in self.layers.describe().split("; ")),
            f"KV in {dtype}: {of_each}; a request of {length:,} tokens takes "
            f"{self.layers.bytes_of_sequence(length, dtype) / _GIB:.3f} GiB",
            f"an engine: {_count(engine.gpus, 'GPU')} of {engine.gpu_bytes / _GIB:.1f} GiB, of which "
            f"{engine.utilization:g} is used; weights {engine.weights_bytes / _GIB:.1f} GiB in all, "
            f"{engine.overhead_bytes / _GIB:.1f} GiB a GPU for other things",
        ]

    def _tier_rows(self) -> list[str]:
        head = ["tier", "GiB", "bytes a token", "tokens", f"blocks of {self.engine.block_tokens}", "requests"]
        rows = [
            [
                tier.name,
                f"{tier.size_bytes / _GIB:.1f}",
                f"{tier.bytes_per_token:,.0f}",
                f"{tier.tokens:,}",
                f"{tier.blocks:,}",
                f"{tier.tokens / self.engine.sequence_tokens:,.1f}",
            ]
            for tier in self.tiers
        ]
        return align_columns([head, *rows])

    def _traffic_title(self) -> str:
        assert self.traffic is not None
        trace = self.traffic.trace
        engines = self.traffic.fleet.instances
        return (
            f"{trace.name}, {name_half(trace.half)}: {trace.requests} requests, {engines} engines, "
            f"load {self.traffic.load:g}, {self.traffic.policy}; hit ceiling {trace.hit_ceiling():.3f}"
        )

    def _traffic_rows(self) -> list[str]:
        token = self.tiers[0].bytes_per_token
        rows = [
            [
                name_row(row.name, row.summary),
                f"{row.tokens:,}",
                f"{row.tokens * token / _GIB:.1f}",
                f"{row.summary.hit_rate:.3f}",
                f"{row.summary.ttft_mean_s:.3f}",
                f"{row.summary.ttft_p99_s:.2f}",
                f"{row.summary.goodput:.3f}",
            ]
            for row in self.rows
        ]
        return align_columns([["cache", "tokens", "GiB", "hit", "TTFT", "p99", "goodput"], *rows])

    def _cheapest(self) -> str:
        assert self.wanted is not None
        what = " and ".join(
            ([] if self.wanted.hit_rate is None else [f"a hit rate of {self.wanted.hit_rate:g}"])
            + ([] if self.wanted.ttft_s is None else [f"a mean TTFT of {self.wanted.ttft_s:g} s"])
        )
        row = self.wanted.find_smallest(self.rows)
        if row is None:
            return f"{what}: no size that was played reaches it (--sizes plays others; more engines help TTFT)"
        found = f"{what}: {row.tokens:,} tokens an engine ({row.name}) are enough"
        setting = find_cheapest(self.engine, self.layers, row.tokens)
        if setting is None:
            return f"{found}, more than 64 such GPUs hold"
        return f"{found}; cheapest: {_count(setting.gpus, 'such GPU')} an engine, KV in {setting.dtype}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


_LEGEND = (
    "cache: KV memory of each engine, 1x is the planned size; GiB as in the device tier; hit: share of prompt tokens",
    "found in cache; TTFT (mean, p99): s; goodput: share with TTFT under 2 s and TPOT under 100 ms. Speeds are the",
    "engine model's (--engine, --prefill-tokens-per-s) at every size",
)
