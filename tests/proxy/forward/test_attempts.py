"""Where the next attempt goes, and after what pause."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import cast

from kvproxy.base.types import EndpointId
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.cluster.settings import EndpointRetrySettings
from kvproxy.proxy.forward.answer import RetryState


class Fake:
    """The attributes of an endpoint that attempts read."""

    def __init__(self, name: str, retry: EndpointRetrySettings | None) -> None:
        self.id = EndpointId(name)
        self.engine = SimpleNamespace(members=(self.id,))
        self.retry = retry


def test_the_pauses_of_an_endpoints_own_retries_grow_up_to_their_bound() -> None:
    """Times `multiplier`, then `max_backoff`; the endpoint after it is tried at once, and its pauses start again."""
    own = EndpointRetrySettings(attempts=5, backoff=0.1, multiplier=3, max_backoff=0.5)
    attempts = RetryState(rng=random.Random(1))
    for name in "ab":
        endpoint = cast("Endpoint", Fake(name, own))
        pauses = [attempts.count_failure(endpoint) for _ in range(5)]
        assert [None if pause is None else round(pause, 6) for pause in pauses] == [0.1, 0.3, 0.5, 0.5, 0.0]
        assert attempts.again is None
    assert attempts.excluded == {"a", "b"}


class Longest(random.Random):
    """Draws the end of every range."""

    def uniform(self, a: float, b: float) -> float:
        return b


def test_the_pauses_between_rounds_double_up_to_their_bound() -> None:
    """A round is over once all endpoints were tried; then all are eligible again."""
    attempts = RetryState(rng=Longest())
    assert attempts.next_round() is None
    pauses = []
    for _ in range(8):
        attempts.count_failure(cast("Endpoint", Fake("a", None)))
        pauses.append(attempts.next_round())
        assert attempts.excluded == set()
    assert pauses == [0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
