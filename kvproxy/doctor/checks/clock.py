"""Do the engines' clocks agree with ours?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvproxy.doctor.checks.chat import TRIAL_CALLS
from kvproxy.doctor.engine import Engine
from kvproxy.doctor.finding import Finding, ok, warning
from kvproxy.errors import ClientError

#: Dates in headers have whole seconds, and an answer takes its time.
_TOLERATED_S = 2.0


@dataclass(frozen=True, slots=True)
class ClockCheck:
    """By the time stamps of its KV events where there are some, else by the Date header. `trial`: a prompt is sent."""

    engine: Engine
    trial: bool = True

    name = "clock"
    calls = TRIAL_CALLS

    @property
    def where(self) -> str:
        return self.engine.where

    async def find(self) -> Sequence[Finding]:
        skew_s = await self._event_skew_s() if self.trial else None
        if skew_s is None:
            skew_s = (await self.engine.hello()).skew_s
        if skew_s is None:
            return []
        if abs(skew_s) <= _TOLERATED_S:
            return [ok(self.where, "its clock agrees with ours")]
        what = f"its clock is {abs(skew_s):.1f} s {'ahead of' if skew_s > 0 else 'behind'} ours"
        return [warning(self.where, what, "run NTP on both hosts: event lag, leases and logs are compared by clock")]

    async def _event_skew_s(self) -> float | None:
        try:
            heard = (await self.engine.trial()).heard
        except ClientError:
            return None
        return next((-one.lag_s for one in heard if one.mine is not None and one.lag_s is not None), None)
