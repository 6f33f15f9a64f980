"""Trial of rewriting prompts: sessions are rewritten or not at random, and the engines' reuse of their prompts is
compared. Pure.

The measure is the mean share of a session's prompts that was reused, since the turns of one session are alike.
Rewriting is on for good once that share is significantly higher with it, and off once it is clear that it cannot be
higher by a worthwhile share, or after so many sessions that it should have shown."""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import StrEnum

#: The least difference of shares that is worth rewriting prompts for.
LEAST_GAIN = 0.03
#: Sessions with and without before anything is concluded; turns of one that make it count.
_LEAST_SESSIONS = 8
_LEAST_TURNS = 3
#: The threshold of a test that is repeated many times.
_SURELY = 3.5
_CLEARLY = 2.5
#: Lower bound on the standard error of a difference.
_LEAST_ERROR = 0.005
#: Sessions that were rewritten after which it should have shown; all that are kept of both kinds.
_ENOUGH_SESSIONS = 400
MAX_SESSIONS = 4096
#: Turns between two looks.
_EVERY = 64


class TrialState(StrEnum):
    """State of a trial; a metric label."""

    TRYING = "trying"
    ON = "on"
    OFF = "off"


class _Session:
    __slots__ = ("share", "treated", "turns")

    def __init__(self, *, treated: bool) -> None:
        self.treated = treated
        self.turns = 0
        self.share = 0.0  # reused, the sum over its turns


class Trial:
    """Of one combination of rules on one cluster's traffic. Bounded by MAX_SESSIONS, the latest of which count."""

    def __init__(self, *, share: float, seed: int) -> None:
        self.state = TrialState.ON if share >= 1.0 else TrialState.TRYING
        self.gain: float | None = None  # of the reused share, at the last look
        self._bound = int(share * 2**32)
        self._seed = seed
        self._sessions: dict[int, _Session] = {}
        self._turns = 0

    def applies(self, session: int) -> bool:
        """Return True if the session's prompts are rewritten: all of them, or none, while the trial lasts."""
        if self.state is TrialState.TRYING:
            return self._is_treated(session)
        return self.state is TrialState.ON

    def observe_turn(self, session: int, *, prompt_tokens: int, cached_tokens: int) -> TrialState | None:
        """Return an engine reused so much of a prompt that the rules change, or would; the new state, if that settles
        it."""
        if self.state is not TrialState.TRYING or prompt_tokens <= 0:
            return None
        known = self._sessions.pop(session, None)
        if known is None:
            if len(self._sessions) >= MAX_SESSIONS:
                del self._sessions[next(iter(self._sessions))]
            known = _Session(treated=self._is_treated(session))
        self._sessions[session] = known
        known.turns += 1
        known.share += min(1.0, cached_tokens / prompt_tokens)
        self._turns += 1
        return self._look() if self._turns % _EVERY == 0 else None

    def _is_treated(self, session: int) -> bool:
        return (session ^ self._seed) % 2**32 < self._bound

    def _look(self) -> TrialState | None:
        counted = [one for one in self._sessions.values() if one.turns >= _LEAST_TURNS]
        treated = [one.share / one.turns for one in counted if one.treated]
        others = [one.share / one.turns for one in counted if not one.treated]
        if min(len(treated), len(others)) < _LEAST_SESSIONS:
            return None
        (mean, spread), (other_mean, other_spread) = _mean(treated), _mean(others)
        self.gain = mean - other_mean
        error = max(_LEAST_ERROR, math.sqrt(spread / len(treated) + other_spread / len(others)))
        if self.gain >= LEAST_GAIN and self.gain >= _SURELY * error:
            self.state = TrialState.ON
        elif self.gain + _CLEARLY * error < LEAST_GAIN or len(treated) >= _ENOUGH_SESSIONS:
            self.state = TrialState.OFF
        else:
            return None
        self._sessions.clear()
        return self.state


def _mean(values: Iterable[float]) -> tuple[float, float]:
    """Mean and variance."""
    numbers = list(values)
    mean = sum(numbers) / len(numbers)
    return mean, sum((one - mean) ** 2 for one in numbers) / max(1, len(numbers) - 1)
