"""Fixtures every test may use: a fake clock, and `async def` tests run by anyio on asyncio."""

from __future__ import annotations

import gc
import signal
import ssl
from pathlib import Path
from typing import Any

import certifi
import httpx
import pytest
from hypothesis import HealthCheck, settings

from tests.support.clock import FakeClock
from tests.support.examples import examples

#: Hypothesis measures no time: neither how long an example takes nor how long it takes to make one.
settings.register_profile(
    "any machine", deadline=None, max_examples=examples(100), suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")

_AUTHORITY = Path(__file__).with_name("fixtures") / "authority.pem"


def _trust_little(verify: Any = True, cert: Any = None, trust_env: bool = True) -> ssl.SSLContext:
    """Make an httpx client's TLS context with one authority. All those of certifi or `SSL_CERT_FILE` take 42 ms, for
    clients that never leave loopback."""
    return httpx.create_ssl_context(verify, cert, trust_env=False)


certifi.where = lambda: str(_AUTHORITY)
httpx._transports.default.create_ssl_context = _trust_little  # type: ignore[attr-defined]

#: Of clients without limits of their own: httpx's 5 s pass where a busy machine stands still.
_PATIENCE_S = 60.0
for _what in ("connect", "read", "write", "pool"):
    setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, _what, _PATIENCE_S)

# Collecting makes millions of objects that stay: the garbage collector would walk them again and again.
gc.disable()


def pytest_collection_finish() -> None:
    """Let the garbage collector work, but not on tests and modules."""
    gc.freeze()
    gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option for uvloop: tests run on asyncio's own event loop by default; those of sockets always run on
    both."""
    parser.addoption("--uvloop", action="store_true", help="run tests that are coroutines on uvloop")


def pytest_configure() -> None:
    """SIGINT interrupts, here and in processes that tests start, even where it was ignored (`nohup make test &`)."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no tests of a folder whose marker is deselected: their clients take seconds to load."""
    deselected = config.getoption("markexpr").split(" and ")
    ignored = collection_path.parent == Path(__file__).parent and f"not {collection_path.name}" in deselected
    return True if ignored else None


@pytest.fixture
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": request.config.getoption("--uvloop")}


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()
