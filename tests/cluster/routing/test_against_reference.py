"""Ledger, speeds and cost agree with the reference over random histories, but for steps that are overdue."""

from __future__ import annotations

from random import Random

import pytest

from kvproxy.cluster.routing import kv_aware
from kvproxy.cluster.routing.kv_aware import CostWeights, KvAware
from kvproxy.cluster.routing.load import Reservation
from kvproxy.cluster.routing.speeds import SpeedModel
from kvproxy.cluster.routing.work import HEAD_TOKENS, MAX_PROGRESS, OVERDUE
from tests.cluster.routing import reference_speed_model as reference
from tests.cluster.routing.fleet import FakeCandidate, ask, fleet


class TwinFleet:
    """The same history told to the project's objects and to the reference's."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.speeds = SpeedModel()
        weights = CostWeights(crowding=0.0, congestion=0.0, stall=0.1, usual_waits=0.0)
        self.policy = KvAware(rng=Random(0), speeds=self.speeds, weights=weights)
        self.candidates = fleet(3)
        self.model = reference.SpeedModel()
        self.ledgers = [reference.Endpoint() for _ in self.candidates]
        self.live: list[tuple[int, int, Reservation]] = []
        self.now = 100.0
        for candidate in self.candidates:
            self._connect(candidate)

    def _connect(self, candidate: FakeCandidate) -> None:
        candidate.load.on_sample = lambda work, busy_s, now, *, lower, scraped=False: self.policy.observe_sample(
            candidate.id, work, busy_s, now
        )

    def step(self, number: int) -> None:
        """One random event."""
        self.now += self.random.choice([0.0005, 0.01, 0.3, 4.0])
        action = self.random.random()
        if action < 0.5 or not self.live:
            index = self.random.randrange(3)
            uncached, cached = self.random.randrange(1, 9000), self.random.randrange(0, 60000)
            reservation = self.candidates[index].load.reserve(uncached, cached, self.now)
            self.ledgers[index].placed(number, uncached, cached, self.now)
            self.live.append((index, number, reservation))
        else:
            index, placed, reservation = self.live.pop(self.random.randrange(len(self.live)))
            load, ledger = self.candidates[index].load, self.ledgers[index]
            if action < 0.93:
                load.first_token(reservation, self.now)
                ledger.first_token(placed, self.model, f"e{index}", self.now)
            elif placed in ledger.pend:
                ledger.cancelled(placed)
                ledger.anchor = ledger.last = self.now
            load.release(reservation, self.now)
            ledger.inflight -= 1

    def costs(self, uncached: int, cached: int, hot_missing: int) -> tuple[list[float], list[float]]:
        """Costs of one request, by the project and by the reference."""
        request = ask(uncached + cached, {f"e{i}": cached for i in range(3)}, hot=cached + hot_missing)
        ours = self.policy.choose(request, self.candidates, self.now).costs
        theirs = [
            reference.cost(self.model, ledger, f"e{index}", uncached, cached, hot_missing, self.now, kappa=0.0)
            + self.overdue_s(ledger, f"e{index}")
            for index, ledger in enumerate(self.ledgers)
        ]
        return list(ours), theirs

    def overdue_s(self, ledger: reference.Endpoint, name: str) -> float:
        """Return the work that the reference counts as done of an overdue step; the project counts none."""
        head = [0.0] * 3
        for work in ledger.pend.values():
            head = [total + part for total, part in zip(head, work, strict=True)]
            if head[1] >= HEAD_TOKENS:
                break
        head_s = self.model.factor(name, self.now) * self.model.base(head)
        overdue = ledger.pend and self.now - ledger.last > OVERDUE * head_s
        return MAX_PROGRESS * head_s if overdue else 0.0


@pytest.mark.parametrize("seed", range(4))
def test_costs_equal_the_reference(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """After every event of a random history: same wait, same factors, same cost, besides what is late."""
    monkeypatch.setattr(kv_aware, "LATE_COST", 0.0)
    twins = TwinFleet(seed)
    for number in range(400):
        twins.step(number)
        ours, theirs = twins.costs(twins.random.randrange(1, 5000), twins.random.randrange(0, 9000), number % 900)
        assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-9)
    assert twins.speeds.seconds[:3] == pytest.approx(
        [theta * scale for theta, scale in zip(twins.model.th, twins.model.sc, strict=True)], rel=1e-9
    )
    assert twins.speeds.estimates(twins.now).samples > 50
