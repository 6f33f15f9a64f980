"""The adviser: receipts and what engines report of themselves become advice, facts first, then what replay expects."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TextIO

from kvproxy.base.errors import describe_os_error
from kvproxy.base.types import Clock
from kvproxy.cache.clients.engine_metrics import EngineKind
from kvproxy.cache.feature import find_reports
from kvproxy.cluster.settings import ClusterSettings, EnginePriorityMode
from kvproxy.lab.advise.advice import DOES_NOT_FIT, Advice, Fit, Gain, NotGiven, why_not_given
from kvproxy.lab.advise.candidates import Candidate, list_candidates
from kvproxy.lab.advise.engines import EngineSettingsSeen, engines_of
from kvproxy.lab.advise.known import KnownFacts, advise_from_facts, much_waits, name_engines
from kvproxy.lab.advise.simulate import MIN_REQUESTS, MIN_SPAN_S, Simulation
from kvproxy.lab.advise.today import NoModel, Today, model_today
from kvproxy.lab.advise.traffic import Traffic, measure_occupancy, read_traffic
from kvproxy.operate.config.schema import Config, find_kvcache_settings
from kvproxy.operate.doctor.flags import Setting
from kvproxy.operate.receipts.files import ReceiptReader

_OLD_S = 86_400.0


@dataclass(frozen=True, slots=True)
class PoolAdvice:
    """Advice for one pool of engines that share requests. Without a simulation `today` and `fit` are None; `notes` give
    the reason and further limits of the advice."""

    name: str
    engines: Sequence[EngineSettingsSeen]
    traffic: Traffic | None = None
    today: Today | None = None
    fit: Fit | None = None
    advice: Sequence[Advice] = ()
    not_given: Sequence[NotGiven] = ()
    notes: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class _Simulated:
    today: Today | None = None
    fit: Fit | None = None
    expected: Sequence[tuple[Candidate, Gain]] = ()


@dataclass(slots=True)
class Adviser:
    """One run. `budget_s` is for the simulations of all pools together; 0: only what needs none. `now` is wall-clock
    seconds since 1970."""

    config: Config
    engines: Sequence[EngineSettingsSeen]
    receipts: Path | None
    budget_s: float
    now: float
    err: TextIO
    clock: Clock = time.monotonic  # of the budget
    interrupted: bool = False
    notes: list[str] = field(default_factory=list)  # on all pools

    def advise(self) -> list[PoolAdvice]:
        """By pool, the busiest first; engines without recorded traffic come last, by cluster."""
        pools = self._read()
        found = []
        for index, traffic in enumerate(pools):
            share = self.budget_s * len(traffic.requests) / max(1, sum(len(one.requests) for one in pools[index:]))
            found.append(self._pool(traffic, share))
            self.budget_s -= share
        told = {engine.rank_of or engine.id for pool in found for engine in pool.engines}
        for name in self.config.clusters:
            rest = [one for one in self.engines if one.cluster == name and one.id not in told]
            if rest:
                known = KnownFacts(rest, kvcache=find_kvcache_settings(self.config))
                found.append(PoolAdvice(f"cluster {name}", rest, advice=advise_from_facts(known), notes=_notes(rest)))
        return found

    def _read(self) -> list[Traffic]:
        if self.receipts is None:
            self.notes.append(
                "no receipts: set `receipts.path` (docs/operations.md), let some traffic pass, and ask again; until "
                "then only what engines say of themselves is known"
            )
            return []
        reading = ReceiptReader(self.receipts)
        try:
            pools = read_traffic(reading)
        except OSError as error:
            self.notes.append(f"no receipts: {describe_os_error(error)}")
            return []
        if reading.broken:
            self.notes.append(f"{reading.broken} lines of the receipts cannot be read and were passed over")
        if not pools:
            self.notes.append(f"the receipts in {self.receipts} have no answered request")
        if self.config.receipts.sample < 1.0:
            self.notes.append(
                f"receipts are a sample of {self.config.receipts.sample:g}, which does not show requests waiting for "
                "others; set `receipts.sample: 1.0`"
            )
        return pools

    def _pool(self, traffic: Traffic, budget_s: float) -> PoolAdvice:
        engines = engines_of(self.engines, traffic.cluster, traffic.endpoints)
        cluster = self.config.clusters.get(traffic.cluster, ClusterSettings())
        ordered = cluster.engine_priority is not EnginePriorityMode.OFF
        known = KnownFacts(engines, traffic, measure_occupancy(traffic), find_kvcache_settings(self.config), ordered)
        notes = _notes(engines)
        age_s = self.now - traffic.latest_at
        if age_s > _OLD_S:
            notes.append(f"the latest receipt is {age_s / _OLD_S:.0f} days old: traffic may be another by now")
        found = _Simulated()
        if reason := self._why_not(traffic, budget_s):
            notes.append(reason)
        else:
            try:
                found = self._simulate(known, traffic, cluster, budget_s, notes)
            except NoModel as error:
                notes.append(f"nothing is simulated: {error}")
        given, refused = _sort(found.expected)
        if found.fit is None or not found.fit.good:
            given += much_waits(known)
        said = {(one.setting, one.flags) for one in given}
        facts = [one for one in advise_from_facts(known) if (one.setting, one.flags) not in said]
        return PoolAdvice(traffic.name, engines, traffic, found.today, found.fit, [*facts, *given], refused, notes)

    def _simulate(
        self, known: KnownFacts, traffic: Traffic, cluster: ClusterSettings, budget_s: float, notes: list[str]
    ) -> _Simulated:
        engines = known.engines
        occupancy = known.occupancy
        kvcache = known.kvcache
        follows = kvcache is not None and find_reports(kvcache) is not None
        today = model_today(traffic, engines, occupancy, cluster, follows_events=follows)
        simulation = Simulation(traffic, today, budget_s=budget_s, err=self.err, clock=self.clock)
        fit = simulation.fit_today(len(list_candidates(today, engines, occupancy, kvcache=kvcache)))
        expected: list[tuple[Candidate, Gain]] = []
        if fit is not None and fit.good:
            expected = simulation.expect_gains(
                list_candidates(simulation.today, engines, occupancy, kvcache=kvcache), fit
            )
        elif fit is not None:
            notes.append(
                f"the model does not fit this fleet: it is {abs(fit.error):.0%} off, more than {DOES_NOT_FIT:.0%}; "
                "only advice without a model is given"
            )
        self.interrupted |= simulation.interrupted
        if simulation.ended_early:
            notes.append("interrupted" if simulation.interrupted else f"the budget of {budget_s:.0f} s is spent")
        return _Simulated(simulation.today, fit, expected)

    def _why_not(self, traffic: Traffic, budget_s: float) -> str:
        """Why nothing is simulated; "" where something can be."""
        if budget_s <= 0 or self.interrupted:
            return "nothing is simulated: its time budget is 0" if not self.interrupted else "interrupted"
        if self.config.receipts.sample < 1.0:
            return "nothing is simulated: receipts are a sample"
        if len(traffic.requests) < MIN_REQUESTS or traffic.span_s < MIN_SPAN_S:
            return (
                f"nothing is simulated: {len(traffic.requests)} answered requests in {traffic.span_s / 60:.1f} min are "
                f"recorded, at least {MIN_REQUESTS} in {MIN_SPAN_S / 60:.0f} min are needed"
            )
        if not any(one.prefixes for one in traffic.requests):
            return (
                "nothing is simulated: the receipts lack shared prefixes (`receipts.prefixes` is off, they "
                "were written by an older kvproxy, or there is no kvcache filter)"
            )
        if traffic.usual_output_tokens is None:
            return "nothing is simulated: no answer reports its length (usage)"
        return ""


def _notes(engines: Sequence[EngineSettingsSeen]) -> list[str]:
    notes = [f"no answer from endpoint {one.id}: {one.error}" for one in engines if one.error]
    kinds = sorted({one.kind for one in engines if not one.error})
    if len(kinds) > 1:
        notes.append(f"engines of several kinds ({', '.join(kinds)}): flags are spelled for each")
    unknown = [one.id for one in engines if not one.error and one.kind is EngineKind.UNKNOWN]
    if unknown:
        notes.append(f"{name_engines(unknown)}: of unknown kind, flags are spelled as vLLM's")
    versions = sorted({one.version for one in engines if one.version})
    if len(versions) > 1 and len(kinds) == 1:
        notes.append(f"engines of several versions: {', '.join(versions)}")
    return notes


def _sort(expected: Sequence[tuple[Candidate, Gain]]) -> tuple[list[Advice], list[NotGiven]]:
    """Sort into recommendations, the largest gain first, and the rest."""
    best: dict[Setting, Advice] = {}  # of one setting the better value alone
    for candidate, gain in sorted(expected, key=lambda each: each[1].ttft_mean.value):
        if not why_not_given(gain):
            what = candidate.advice.what + (f" ({candidate.at_most})" if candidate.at_most else "")
            best.setdefault(candidate.advice.setting, replace(candidate.advice, what=what, gain=gain))
    refused = [
        NotGiven(candidate.advice.setting, candidate.advice.what, gain, reason)
        for candidate, gain in expected
        if (reason := why_not_given(gain))
    ]
    return list(best.values()), refused
