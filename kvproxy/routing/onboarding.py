"""What bringing cached tokens up from host memory or disk costs, measured from first tokens."""

from __future__ import annotations


class OnboardingCost:
    """Seconds a token, as a decayed ratio of sums that starts from nothing known: 0.

    The prior counts as tokens that came for free, and no token is believed dearer than computing it, because a price
    four times too high costs several times what one four times too low does.
    """

    def __init__(self, *, decay: float = 0.99, prior_tokens: float = 65_536.0) -> None:
        self._decay = decay
        self._prior_tokens = prior_tokens
        self._seconds = 0.0
        self._tokens = 0.0

    @property
    def seconds_per_token(self) -> float:
        """The present estimate."""
        return max(0.0, self._seconds) / (self._tokens + self._prior_tokens)

    @property
    def sums(self) -> tuple[float, float]:
        """Seconds and tokens it rests on."""
        return self._seconds, self._tokens

    def resume(self, sums: tuple[float, float]) -> None:
        """Go on from the `sums` of an earlier life."""
        self._seconds, self._tokens = sums

    def observe(self, lower_tokens: float, extra_s: float, bound_s: float) -> None:
        """A sample took `extra_s` longer than its prefill; computing its `lower_tokens` would have taken `bound_s`."""
        self._seconds = self._decay * self._seconds + min(bound_s, max(-bound_s, extra_s))
        self._tokens = self._decay * self._tokens + lower_tokens
