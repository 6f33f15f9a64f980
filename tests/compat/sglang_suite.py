"""SGLang's own tests of its API: the kits in its distribution that need nothing but a server."""

from __future__ import annotations

from tests.compat.comparison import read_outcomes
from tests.compat.environments import INSIDE, install, run_pytest
from tests.real.engines.place import HERE, SGLANG, TINY

_PACKAGES = ("pytest==9.2.0", "pytest-asyncio==1.5.0", "pytest-timeout==2.4.0", "requests")


def run(url: str) -> dict[str, str]:
    """Return the outcomes of these tests against the server at `url`."""
    report = run_pytest(
        install("venv-sglang", _PACKAGES, on=SGLANG),
        ["-p", "sglang_on_cpu", INSIDE / "sglang_kits.py"],
        url,
        folder=INSIDE,
        environment={"PYTHONPATH": str(HERE / "inside"), "KVPROXY_COMPAT_MODEL": TINY.name},
    )
    return read_outcomes(report)
