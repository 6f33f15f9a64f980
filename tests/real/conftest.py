"""Acceptance against the real engines: everything here is marked `real` and runs by `make test-real`."""

from __future__ import annotations

from collections.abc import Callable

import psutil
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
    """Return a function that prints one line about a test's observation."""
    writer = request.config.get_terminal_writer()
    return lambda text: writer.write(f"\n    {text}\n", flush=True)


def needs_memory(*, gib: int) -> None:
    """Skips when the machine has less to spare than the engines about to start will take."""
    available = psutil.virtual_memory().available / (1 << 30)
    if available < gib:
        pytest.skip(f"{available:.1f} GiB of memory are free, these engines need {gib}")
