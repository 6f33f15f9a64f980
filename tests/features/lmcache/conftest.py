"""Prompts of tests are short: they are compressed all the same."""

from __future__ import annotations

import pytest

from kvproxy.features.lmcache import strategies


@pytest.fixture(autouse=True)
def _compress_short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategies, "COMPRESS_MIN_TOKENS", 0)
