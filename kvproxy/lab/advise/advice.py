"""Advice: a setting with its exact flag, the reason, the expected gain, its certainty, and whether it is worth
reporting."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean, stdev

from kvproxy.lab.replay.results import ReplayOutcome, percentile
from kvproxy.operate.doctor.flags import Setting


class Confidence(StrEnum):
    """How sure an expected gain is."""

    HIGH = "high"
    MEDIUM = "medium"
    LOW = "low"


@dataclass(frozen=True, slots=True)
class Ratio:
    """With the setting against without it: the mean over seeds and halves of the recording, and the standard deviation
    between these, as a factor less 1."""

    value: float
    spread: float


@dataclass(frozen=True, slots=True)
class Gain:
    """Gain expected from a replay of the recorded requests. `runs`: pairs of a seed and a half of the recording."""

    ttft_mean: Ratio
    ttft_p99: Ratio
    itl_p99: Ratio
    e2e_mean: Ratio
    runs: int
    confidence: Confidence
    at_most: bool = False  # the simulation leaves a cost of it out


@dataclass(frozen=True, slots=True)
class Advice:
    """One thing to set. `flags` are lines of an engine's command, by engines; `config` is kvproxy's own."""

    setting: Setting
    what: str
    flags: tuple[tuple[str, str], ...] = ()  # (endpoints, flag)
    config: str = ""
    gain: Gain | None = None  # None: it follows from observations, without a simulation


@dataclass(frozen=True, slots=True)
class NotGiven:
    """A setting that was simulated and is not recommended."""

    setting: Setting
    what: str
    gain: Gain
    reason: str


#: Error in mean TTFT from which the model does not fit, and below which it fits well.
DOES_NOT_FIT = 0.30
FITS_WELL = 0.15
_MANY_REQUESTS = 1000
_MANY_RUNS = 6
#: Smallest gain worth a restart, the standard errors it must exceed, and the gain after some runs below which a
#: candidate is dropped.
LEAST_GAIN = 0.03
_ERRORS = 2.0
_PROMISING = 0.02


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one half of a run, in seconds; times between tokens are known of the whole run alone."""

    ttft_mean: float
    ttft_p99: float
    e2e_mean: float
    itl_p99: float


@dataclass(frozen=True, slots=True)
class Fit:
    """Simulation of today's settings against measurements, on the half that was not fitted. Seconds; hit rates are
    shares of the prompt tokens; `measured_hit` is None if engines do not report it."""

    simulated_ttft_s: float
    measured_ttft_s: float
    simulated_hit: float
    measured_hit: float | None
    requests: int
    span_s: float

    @property
    def error(self) -> float:
        """How far the simulated mean TTFT is off, as a share of the measured one."""
        return self.simulated_ttft_s / self.measured_ttft_s - 1.0 if self.measured_ttft_s else math.inf

    @property
    def good(self) -> bool:
        """True if the fit is good enough for expectations."""
        return abs(self.error) <= DOES_NOT_FIT


def summarize_half(outcomes: Sequence[ReplayOutcome], itl_p99: float) -> Figures:
    """Of these outcomes; `itl_p99` is that of the whole run."""
    ttft = sorted(one.ttft_s for one in outcomes if one.ttft_s is not None)
    e2e = [one.finished_at - one.arrived_at for one in outcomes if one.finished_at is not None]
    return Figures(fmean(ttft or [0.0]), percentile(ttft, 0.99), fmean(e2e or [0.0]), itl_p99)


def compute_gain(pairs: Sequence[tuple[Figures, Figures]], fit: Fit, *, at_most: bool = False) -> Gain:
    """From halves of runs without and with a setting."""
    mean = _ratio([(before.ttft_mean, after.ttft_mean) for before, after in pairs])
    return Gain(
        ttft_mean=mean,
        ttft_p99=_ratio([(before.ttft_p99, after.ttft_p99) for before, after in pairs]),
        itl_p99=_ratio([(before.itl_p99, after.itl_p99) for before, after in pairs]),
        e2e_mean=_ratio([(before.e2e_mean, after.e2e_mean) for before, after in pairs]),
        runs=len(pairs),
        confidence=_confidence(mean, len(pairs), fit),
        at_most=at_most,
    )


def is_promising(pairs: Sequence[tuple[Figures, Figures]]) -> bool:
    """Return True if further runs may show a gain."""
    return _ratio([(before.ttft_mean, after.ttft_mean) for before, after in pairs]).value < 1.0 - _PROMISING


def _ratio(pairs: Sequence[tuple[float, float]]) -> Ratio:
    logs = [math.log(after / before) for before, after in pairs if before > 0 and after > 0]
    if not logs:
        return Ratio(1.0, 0.0)
    return Ratio(math.exp(fmean(logs)), math.exp(stdev(logs)) - 1.0 if len(logs) > 1 else 0.0)


def _confidence(mean: Ratio, runs: int, fit: Fit) -> Confidence:
    """By the model's error, the traffic there was, and how far runs and halves agree."""
    steady = mean.spread <= abs(1.0 - mean.value)
    if not steady or runs < _MANY_RUNS // 2 or fit.requests < _MANY_REQUESTS // 3:
        return Confidence.LOW
    if abs(fit.error) <= FITS_WELL and runs >= _MANY_RUNS and fit.requests >= _MANY_REQUESTS:
        return Confidence.HIGH
    return Confidence.MEDIUM


def why_not_given(gain: Gain) -> str:
    """Why a simulated setting is not recommended; "" where it is."""
    better = 1.0 - gain.ttft_mean.value
    if better < LEAST_GAIN:
        return "no gain" if better < 0 else f"less than {LEAST_GAIN:.0%}"
    if -math.log(gain.ttft_mean.value) < _ERRORS * math.log1p(gain.ttft_mean.spread) / math.sqrt(gain.runs):
        return "within noise"
    worst, name = max(
        (gain.ttft_p99.value, "TTFT p99"), (gain.itl_p99.value, "ITL p99"), (gain.e2e_mean.value, "whole answers")
    )
    return f"{name} pays for it" if worst - 1.0 > better else ""
