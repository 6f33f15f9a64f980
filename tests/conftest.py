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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every coroutine test runs under anyio's plugin; no marker needed."""
    for item in items:
        if isinstance(item, pytest.Function) and item.function.__code__.co_flags & 0x80:
            item.add_marker(pytest.mark.anyio)
