"""`kvproxy doctor` continues a finished answer from its middle."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.types import Send

from kvproxy.features.resume.check import check_continuation
from kvproxy.features.resume.proof import find_middle
from kvproxy.operate.config.load import check_config
from kvproxy.operate.doctor.deployment import ClusterFacts, survey_deployment
from kvproxy.operate.doctor.report import Finding, Severity
from kvproxy.operate.doctor.tools import Tools
from tests.lab.simulator.support import engine
from tests.support.fake_engine import Call, FakeEngine, reply
from tests.support.loopback import serve


async def examine(url: str) -> Finding:
    """Return the finding about a cluster with this engine."""
    config, problems = check_config({"endpoints": {"a": url}, "routes": [{"resume": "text"}]})
    assert config is not None, problems
    async with Tools() as tools:
        deployment = await survey_deployment(config, tools=tools)
        (found,) = await check_continuation(ClusterFacts(deployment, "default")).collect()
    return found


async def test_a_model_that_continues_its_answer() -> None:
    """Its words come out the same."""
    async with engine() as one:
        found = await examine(one.url)
    assert found.severity is Severity.OK
    assert "with the same words" in found.what


ANSWER = "Rain falls when warm air rises and cools until water drops form in the clouds above."


def answering(rest: str, *, whole: str = ANSWER, status: int = 200) -> FakeEngine:
    """Return an engine that goes on with `rest`."""

    async def behave(fake: FakeEngine, call: Call, send: Send) -> None:
        if call.path == "/v1/models":
            await reply(send, 200, b'{"data":[{"id":"m"}]}')
            return
        body: dict[str, Any] = json.loads(call.body)
        continues = body.get("continue_final_message", False)
        text = rest if continues else whole
        answer = {"choices": [{"message": {"content": text}}]}
        await reply(send, status if continues else 200, json.dumps(answer).encode())

    return FakeEngine("a", behave)


@pytest.mark.parametrize(
    ("fake", "severity", "what"),
    [
        (answering(ANSWER[find_middle(ANSWER) :][:20]), Severity.OK, "the same words"),
        (answering(" Rain falls when"), Severity.PROBLEM, "differently"),
        (answering(""), Severity.PROBLEM, "differently"),
        (answering("", status=400), Severity.PROBLEM, "cannot continue half an answer"),
        (answering("", whole="Hi."), Severity.WARNING, "too briefly"),
    ],
)
async def test_other_models(fake: FakeEngine, severity: Severity, what: str) -> None:
    """Templates that begin a new turn, or engines that refuse to continue."""
    async with serve(fake) as url:
        found = await examine(url)
    assert found.severity is severity
    assert what in found.what


def test_the_middle_is_the_end_of_a_word() -> None:
    """Next to the middle."""
    assert "one two three four"[: find_middle("one two three four")] == "one two"
    assert find_middle("word") == 0
