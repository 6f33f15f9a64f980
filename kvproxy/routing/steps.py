"""How long the engines of one pool take between two tokens of an answer, learned from answers as they end. Pure."""

from __future__ import annotations

from collections.abc import Mapping

#: Of a sample's weight, with each one that follows.
_DECAY = 0.99
#: How far the number of sequences has to vary before the slope is believed, in squares of its mean.
_RIDGE = 0.05
#: Share of a step that goes with the number of sequences, before that is known.
_PRIOR_SHARE = 0.25

#: An answer shorter than this says more of its prefill and its end than of what lies between.
MIN_TOKENS = 8


class StepModel:
    """Inter-token time as a line over the sequences in flight, `base_s + sequence_s * sequences`, and the mean length
    of an answer; decayed least squares. Prefill that comes between tokens is part of what is learned."""

    def __init__(self) -> None:
        self._weight = self._n = self._nn = self._y = self._ny = self._tokens = 0.0
        self.base_s = self.sequence_s = 0.0
        self.answer_tokens = 0.0

    def observe(self, output_tokens: int, decode_s: float, sequences: float) -> None:
        """An answer of so many tokens took `decode_s` from its first to its last, beside so many sequences, itself
        among them."""
        if output_tokens < MIN_TOKENS or decode_s <= 0.0 or sequences < 1.0:
            return
        step_s = decode_s / (output_tokens - 1)
        self._weight = _DECAY * self._weight + 1.0
        self._n = _DECAY * self._n + sequences
        self._nn = _DECAY * self._nn + sequences * sequences
        self._y = _DECAY * self._y + step_s
        self._ny = _DECAY * self._ny + sequences * step_s
        self._tokens = _DECAY * self._tokens + output_tokens
        self.answer_tokens = self._tokens / self._weight
        n, y = self._n / self._weight, self._y / self._weight
        trust = _RIDGE * n * n
        covariance, variance = self._ny / self._weight - n * y, self._nn / self._weight - n * n
        slope = (covariance + trust * _PRIOR_SHARE * y / n) / (variance + trust)
        self.sequence_s = max(0.0, min(slope, y / n))
        self.base_s = y - self.sequence_s * n

    def estimates(self) -> Mapping[str, float]:
        """What is believed now; zeros before the first answer."""
        return {
            "itl_base_s": self.base_s,
            "itl_sequence_s": self.sequence_s,
            "answer_tokens": self.answer_tokens,
        }

    def late_s(self, sequences: int, slowness: float, target_s: float) -> float:
        """By how much all answers together end later, against `target_s` a token, if one joins so many sequences."""
        step_s = slowness * (self.base_s + self.sequence_s * sequences)
        late_s, then_late_s = max(0.0, step_s - target_s), max(0.0, step_s + slowness * self.sequence_s - target_s)
        return self.answer_tokens * ((sequences + 1) * then_late_s - sequences * late_s)
