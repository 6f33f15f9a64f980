"""Fixtures every test may use: a fake clock, and `async def` tests run by anyio on asyncio."""

from __future__ import annotations

import pytest

from tests.support.clock import FakeClock


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()
