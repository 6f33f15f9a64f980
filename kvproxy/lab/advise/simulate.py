"""Candidate settings on the recorded traffic in virtual time, each against today's in the same run, under a budget.

Today's settings are simulated first and compared with what was measured: an expectation is worth as much as that
agreement. Then every candidate is played with the seeds that today's settings were played with.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from random import Random
from statistics import fmean
from typing import TextIO

from kvproxy.base.types import Clock
from kvproxy.lab.advise.advice import Figures, Fit, Gain, compute_gain, is_promising, summarize_half
from kvproxy.lab.advise.candidates import Candidate
from kvproxy.lab.advise.today import Today, make_trace
from kvproxy.lab.advise.traffic import RecordedRequest, Traffic
from kvproxy.lab.replay.compare import play_policy
from kvproxy.lab.replay.results import ReplayOutcome, percentile
from kvproxy.lab.replay.settings import Pace
from kvproxy.lab.replay.trace import Trace
from kvproxy.lab.simulator.timing import TokenGaps
from kvproxy.operate.commands.progress import ProgressBar

#: Fewer requests, or less time, do not show the value of a setting.
MIN_REQUESTS = 200
MIN_SPAN_S = 120.0
#: Bounds on the latest requests played, and on their tokens: a trace takes half a byte per token.
_MAX_REQUESTS = 4000
_MAX_TOKENS = 1_000_000_000
#: A recording is not cut below this: fewer runs show more than shorter ones.
_LEAST_REQUESTS = 600
MAX_SEEDS = 5
#: After this many seeds only promising candidates are played again.
_TRIED_SEEDS = 2
#: Caches fill in the first part of a recording; it is played, and not measured.
_WARM = 0.2
#: Rounds of fitting today's settings to the first half of the measurements.
_FITTING = 5
#: Seeds of the runs that the model is judged by.
_JUDGED = (1, 2)
_PREFILL_PART = 0.25
_DECODE_PART = 0.7
_STEP = 1.25


class _OutOfTime(Exception):
    """The budget is spent."""


@dataclass(frozen=True, slots=True)
class _Run:
    outcomes: Sequence[ReplayOutcome]
    itl_p99: float  # over all of it


class Simulation:
    """Plays recorded requests. `clock` is for the budget alone."""

    def __init__(self, traffic: Traffic, today: Today, *, budget_s: float, err: TextIO, clock: Clock = time.monotonic):
        self._traffic = traffic
        self._clock = clock
        self._deadline = clock() + budget_s
        self._requests: Sequence[RecordedRequest] = _latest(traffic.requests)
        self._traces: dict[int, Trace] = {}
        self._err = err
        self._bar = ProgressBar(1, out=err)
        self.today = today
        self.ended_early = False  # the budget was spent, or Ctrl-C was pressed
        self.interrupted = False

    def fit_today(self, runs: int) -> Fit | None:
        """Fit unknown times (of a decode step, and of a prefill beside it) to the first half of the recording and
        return how well today's settings then agree with the second. `runs` are still to come: a recording that would
        take too long is cut to its latest part. None when time ran out."""
        try:
            self._cut(runs)
            best = math.inf
            trial = self.today
            for _ in range(_FITTING):
                run = self._play(trial, 1)
                ttft, token = self._ratios(run)
                if (error := abs(math.log(ttft)) + abs(math.log(token))) < best:
                    best = error
                    self.today = trial
                trial = _slowed(trial, ttft, token)
            return self._judge([self._play(self.today, seed) for seed in _JUDGED])
        except (_OutOfTime, KeyboardInterrupt) as error:
            self._stop(error)
            return None

    def expect_gains(self, candidates: Sequence[Candidate], fit: Fit) -> list[tuple[Candidate, Gain]]:
        """Every candidate's gain, seed by seed as long as there is time; those without a run are left out."""
        ratios: dict[int, list[tuple[Figures, Figures]]] = {index: [] for index in range(len(candidates))}
        self._bar = ProgressBar(len(self._requests) * len(candidates) * MAX_SEEDS, out=self._err)
        try:
            for seed in range(1, MAX_SEEDS + 1):
                promising = [index for index in ratios if seed <= _TRIED_SEEDS or is_promising(ratios[index])]
                if not promising:
                    break
                before = self._halves(self._play(self.today, seed))
                for index in promising:
                    candidate = candidates[index]
                    self._bar.begin(f"{candidate.advice.setting}, run {seed}")
                    after = self._halves(self._play(candidate.today, seed, progress=self._bar.advance))
                    ratios[index] += zip(before, after, strict=True)
                    self._bar.end(len(self._requests))
        except (_OutOfTime, KeyboardInterrupt) as error:
            self._stop(error)
        self._bar.close()
        return [
            (candidate, compute_gain(ratios[index], fit, at_most=bool(candidate.at_most)))
            for index, candidate in enumerate(candidates)
            if ratios[index]
        ]

    def _stop(self, error: BaseException) -> None:
        self.ended_early = True
        self.interrupted = isinstance(error, KeyboardInterrupt)
        self._bar.close()

    def _cut(self, runs: int) -> None:
        """To the latest requests of which a round of all runs and a half fits the budget."""
        began = self._clock()
        self._play(self.today, 1)
        took_s = self._clock() - began
        affordable_s = (self._deadline - self._clock()) / (1.5 * (runs + _FITTING + len(_JUDGED)))
        if took_s > affordable_s:
            count = max(_LEAST_REQUESTS, int(len(self._requests) * affordable_s / took_s))
            self._requests = self._requests[-count:]
            self._traces.clear()

    def _play(self, today: Today, seed: int, *, progress: Callable[[int], None] = lambda done: None) -> _Run:
        def step(done: int) -> None:
            if self._clock() > self._deadline:
                raise _OutOfTime
            progress(done)

        size = today.trace_block_tokens
        if size not in self._traces:
            self._traces[size] = make_trace(self._traffic, self._requests, block_tokens=size)
        spec = today.spec
        gaps = TokenGaps()
        outcomes = play_policy(
            self._traces[size],
            Pace(),
            today.fleet,
            spec.make(rng=Random(seed)),
            spec,
            seed=seed,
            token_gaps=gaps,
            progress=step,
        )
        return _Run(outcomes, gaps.percentile(0.99))

    def _bounds(self) -> tuple[float, float, float]:
        """Seconds from the first arrival: where measuring begins, where its second half begins, and the end."""
        span_s = self._requests[-1].arrived_at - self._requests[0].arrived_at
        return _WARM * span_s, (1 + _WARM) / 2 * span_s, math.inf

    def _measured(self, half: int) -> list[RecordedRequest]:
        bounds = self._bounds()
        first = self._requests[0].arrived_at
        return [one for one in self._requests if bounds[half] <= one.arrived_at - first < bounds[half + 1]]

    def _simulated(self, run: _Run, half: int) -> list[ReplayOutcome]:
        bounds = self._bounds()
        return [one for one in run.outcomes if bounds[half] <= one.arrived_at < bounds[half + 1]]

    def _halves(self, run: _Run) -> tuple[Figures, Figures]:
        first, second = (summarize_half(self._simulated(run, half), run.itl_p99) for half in (0, 1))
        return first, second

    def _ratios(self, run: _Run) -> tuple[float, float]:
        """Return measured over simulated figures of the first half: mean TTFT, and seconds per token."""
        recorded = self._measured(0)
        played = self._simulated(run, 0)
        ttft = _ratio_of(_mean(one.ttft_s for one in recorded), _mean(one.ttft_s for one in played))
        return ttft, _ratio_of(_low(one.token_s for one in recorded), _low(one.tpot_s for one in played))

    def _judge(self, runs: Sequence[_Run]) -> Fit:
        recorded = self._measured(1)
        played = [one for run in runs for one in self._simulated(run, 1)]
        told = [one for one in recorded if one.cached_tokens is not None]
        return Fit(
            simulated_ttft_s=_mean(one.ttft_s for one in played),
            measured_ttft_s=_mean(one.ttft_s for one in recorded),
            simulated_hit=sum(one.cached_tokens for one in played) / max(1, sum(one.prompt_tokens for one in played)),
            measured_hit=sum(one.cached_tokens or 0 for one in told) / sum(one.prompt_tokens for one in told)
            if told
            else None,
            requests=len(self._requests),
            span_s=self._requests[-1].arrived_at - self._requests[0].arrived_at,
        )


def _latest(requests: Sequence[RecordedRequest]) -> Sequence[RecordedRequest]:
    tokens = accumulate(one.prompt_tokens for one in reversed(requests[-_MAX_REQUESTS:]))
    count = sum(total <= _MAX_TOKENS for total in tokens)
    return requests[len(requests) - count :]


def _slowed(today: Today, ttft: float, token: float) -> Today:
    """Prefills and decode steps longer by a part of these factors: what waits multiplies any difference."""
    prefill = min(_STEP, max(1 / _STEP, ttft**_PREFILL_PART))
    decode = token**_DECODE_PART
    timing = today.fleet.timing
    timing = replace(
        timing,
        prefill_tokens_per_s=timing.prefill_tokens_per_s / prefill,
        prefill_step_s=timing.prefill_step_s * prefill,
        decode_step_s=timing.decode_step_s * decode,
        decode_sequence_s=timing.decode_sequence_s * decode,
        decode_resident_block_s=timing.decode_resident_block_s * decode,
    )
    return replace(today, fleet=replace(today.fleet, timing=timing))


def _ratio_of(measured: float, simulated: float) -> float:
    """1 where there is nothing to compare."""
    return measured / simulated if measured > 0 and simulated > 0 else 1.0


def _low(values: Iterable[float | None]) -> float:
    """Return what one in ten stays below: decode steps that few prefills lengthened. 0 of none."""
    return percentile(sorted(one for one in values if one is not None), 0.1)


def _mean(values: Iterable[float | None]) -> float:
    known = [one for one in values if one is not None]
    return fmean(known) if known else 0.0
