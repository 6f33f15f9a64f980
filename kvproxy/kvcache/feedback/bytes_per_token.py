"""How many bytes of a request body make a token, learned per model from the engines' own counts. Pure."""

from __future__ import annotations

from collections.abc import Mapping

#: English prose with JSON around it; replaced by what a model's first responses say.
DEFAULT_BYTES_PER_TOKEN = 4.0
#: What a single response may say: one token a byte, or long runs of whitespace and base64.
_LEAST, _MOST = 0.5, 64.0
#: Shorter prompts are mostly template.
_MIN_TOKENS = 16
_WEIGHT = 0.05


class BytesPerToken:
    """One ratio a model, an average that follows the traffic. Bounded: the model least recently answered is forgotten.

    A dict in the order of the answers, because two look-ups in a cachetools cache cost more than hashing the prompt.
    """

    def __init__(self, *, max_models: int = 256) -> None:
        self._ratios: dict[str, float] = {}
        self._max_models = max_models

    def __len__(self) -> int:
        return len(self._ratios)

    def of(self, model: str) -> float:
        """Bytes a token of `model`."""
        return self._ratios.get(model, DEFAULT_BYTES_PER_TOKEN)

    @property
    def typical(self) -> float:
        """Bytes a token over the models known."""
        return sum(self._ratios.values()) / len(self._ratios) if self._ratios else DEFAULT_BYTES_PER_TOKEN

    @property
    def learned(self) -> Mapping[str, float]:
        """By model, the one least recently answered first."""
        return dict(self._ratios)

    def resume(self, learned: Mapping[str, float]) -> None:
        """Go on from what was learned in an earlier life; what cannot be true is left out."""
        for model, ratio in list(learned.items())[-self._max_models :]:
            if _LEAST <= ratio <= _MOST:
                self._ratios[model] = ratio

    def observe(self, model: str, prompt_bytes: int, prompt_tokens: int) -> None:
        """The engine counted `prompt_tokens` in a prompt of `prompt_bytes`."""
        if prompt_tokens < _MIN_TOKENS or prompt_bytes <= 0:
            return
        seen = min(max(prompt_bytes / prompt_tokens, _LEAST), _MOST)
        known = self._ratios.pop(model, None)
        if known is None and len(self._ratios) >= self._max_models:
            del self._ratios[next(iter(self._ratios))]
        self._ratios[model] = seen if known is None else known + _WEIGHT * (seen - known)
