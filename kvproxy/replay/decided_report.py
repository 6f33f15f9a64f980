"""What other policies would have decided, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvproxy.replay.report import align_columns

_COLUMNS = ("policy", "differs", "regret mean", "p50", "p99", "TTFT", "difference", "hit")


@dataclass(frozen=True, slots=True)
class Recorded:
    """What really was decided. TTFT is from the decision: expected by hindsight, and as it was (streams alone)."""

    decisions: int
    requests: int
    policies: tuple[str, ...]
    ttft_mean_s: float
    real_ttft_mean_s: float | None
    hit_rate: float  # share of the prompt tokens that the chosen endpoints were believed to hold


@dataclass(frozen=True, slots=True)
class Verdict:
    """One policy against what was decided. Regret: what the recorded choices cost more, by this policy's own costs and
    in its own unit; None when it knows none. The difference in TTFT is below 0 where this policy is better."""

    different: int
    differs: float
    regret_mean: float | None
    regret_p50: float | None
    regret_p99: float | None
    ttft_mean_s: float
    ttft_difference_mean_s: float
    hit_rate: float


@dataclass(frozen=True, slots=True)
class Review:
    """Every policy against what was decided."""

    receipts: str
    broken_lines: int
    recorded: Recorded
    policies: Mapping[str, Verdict]

    def as_json(self) -> dict[str, Any]:
        """The whole review."""
        return asdict(self)

    def render_table(self) -> str:
        """For a terminal: seconds, shares, regret in each policy's own unit."""
        recorded = self.recorded
        title = (
            f"{self.receipts}: {recorded.decisions} decisions of {recorded.requests} requests "
            f"by {', '.join(recorded.policies)}"
        )
        if self.broken_lines:
            title += f"; {self.broken_lines} lines are no receipts"
        first = ["as recorded", "", "", "", "", f"{recorded.ttft_mean_s:.3f}", "", f"{recorded.hit_rate:.3f}"]
        lines = align_columns([_COLUMNS, first, *(_row(name, verdict) for name, verdict in self.policies.items())])
        lines.append("Regret is in each policy's own unit of cost: compare it along a row only. TTFT is seconds.")
        if recorded.real_ttft_mean_s is not None:
            lines.append(
                f"TTFT is expected, by speeds learned in hindsight; really it was {recorded.real_ttft_mean_s:.3f} s"
            )
        return "\n".join([title, *lines])


def mean(values: Sequence[float]) -> float | None:
    """None of nothing."""
    return sum(values) / len(values) if values else None


def _signed(seconds: float) -> str:
    """Without a sign where nothing is left of it."""
    text = f"{seconds:+.3f}"
    return text[1:] if float(text) == 0 else text


def _row(name: str, verdict: Verdict) -> list[str]:
    regrets = (verdict.regret_mean, verdict.regret_p50, verdict.regret_p99)
    return [
        name,
        f"{100 * verdict.differs:.1f} %",
        *("-" if value is None else f"{value:.4g}" for value in regrets),
        f"{verdict.ttft_mean_s:.3f}",
        _signed(verdict.ttft_difference_mean_s),
        f"{verdict.hit_rate:.3f}",
    ]
