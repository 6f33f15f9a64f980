"""LangChain's standard tests of chat models: ChatOpenAI by both APIs, and ChatAnthropic."""

from __future__ import annotations

from tests.compat.comparison import read_outcomes
from tests.compat.environments import INSIDE, install, run_pytest
from tests.real.engines.place import TINY

_PACKAGES = (
    "langchain-tests==1.1.9",
    "langchain-openai==1.7.4",
    "langchain-anthropic==1.7.10",
    "pytest==9.2.0",
    "pytest-asyncio==1.5.0",
    "pytest-timeout==2.4.0",
)


def run(url: str) -> dict[str, str]:
    """Return the outcomes of these tests against the server at `url`."""
    report = run_pytest(
        install("venv-langchain", _PACKAGES),
        [INSIDE / "langchain_standard.py"],
        url,
        folder=INSIDE,
        environment={"KVPROXY_COMPAT_MODEL": TINY.name},
    )
    return read_outcomes(report)
