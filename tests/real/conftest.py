"""Acceptance against the real engines: everything here is marked `real` and runs by `make test-real`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.real.engines.place import missing

Saw = Callable[[str], None]


@pytest.fixture(scope="session", autouse=True)
def _installed() -> None:
    lacking = missing()
    if lacking:
        pytest.skip(f"not installed: {lacking}; `make test-real` installs it and runs these tests")


@pytest.fixture(scope="session")
def saw(request: pytest.FixtureRequest) -> Saw:
    """Prints one line about what a test saw."""
    writer = request.config.get_terminal_writer()
    return lambda text: writer.write(f"\n    {text}\n", flush=True)
