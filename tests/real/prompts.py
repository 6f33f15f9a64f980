"""Prompts that were never asked before, so that no test finds another one's cache entries."""

from __future__ import annotations

import json
import random
from typing import Any

_SYLLABLES = ("ka", "lo", "mi", "ne", "ru", "sa", "te", "vo", "zu", "pri", "gal", "dor", "fen", "hul", "bra", "sti")


def text(words: int, *, seed: object) -> str:
    """Made-up words; the same seed gives the same words."""
    rng = random.Random(repr(seed))
    return " ".join("".join(rng.choices(_SYLLABLES, k=rng.randint(1, 3))) for _ in range(words))


def chat(model: str, *turns: str, **fields: Any) -> dict[str, Any]:
    """Return a chat body: user and assistant in turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[index % 2], "content": turn} for index, turn in enumerate(turns)]
    return {"model": model, "messages": messages, "max_tokens": 1, "temperature": 0, **fields}


def raw(body: dict[str, Any]) -> bytes:
    """Return the body as it goes over the wire."""
    return json.dumps(body).encode()
