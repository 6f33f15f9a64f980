"""Checks run side by side, within their deadlines, and none of them raises."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest

from kvproxy.base.errors import ClientUnavailable
from kvproxy.operate.doctor.checks import run_checks
from kvproxy.operate.doctor.report import Check, Finding, Severity, ok
from kvproxy.operate.doctor.tools import SharedAnswers


def probe(act: Callable[[], Awaitable[Sequence[Finding]]], *, calls: int = 1) -> Check:
    """Return a check that does what a test says."""
    return Check("probe", "here", calls, act)


async def test_checks_run_at_the_same_time() -> None:
    """Two that wait for each other both end."""
    barrier = asyncio.Barrier(2)

    async def meet() -> Sequence[Finding]:
        await barrier.wait()
        return [ok("here", "met")]

    report = await run_checks([probe(meet), probe(meet)], timeout_s=20)
    assert [one.what for one in report.passed] == ["met", "met"]
    assert {one.check for one in report.passed} == {"probe"}


async def test_a_deadline_is_a_finding() -> None:
    """A check that hangs ends alone."""

    async def hang() -> Sequence[Finding]:
        await asyncio.Event().wait()
        return []

    async def fine() -> Sequence[Finding]:
        return [ok("here", "fine")]

    report = await run_checks([probe(hang, calls=2), probe(fine)], timeout_s=0.01)
    assert [one.what for one in report.findings] == ["not known after 0.02 s"]
    assert len(report.passed) == 1


async def test_checks_without_an_answer_are_skipped() -> None:
    """A failed exchange is another check's finding."""

    async def unavailable() -> Sequence[Finding]:
        raise ClientUnavailable("endpoint a cannot be connected to")

    report = await run_checks([probe(unavailable)], timeout_s=20)
    assert report.findings == ()
    assert [one.reason for one in report.skipped] == ["endpoint a cannot be connected to"]


async def test_a_broken_check_is_a_finding(caplog: pytest.LogCaptureFixture) -> None:
    """The others go on, and the log has the traceback."""

    async def broken() -> Sequence[Finding]:
        raise ZeroDivisionError

    report = await run_checks([probe(broken)], timeout_s=20)
    assert [(one.severity, one.what) for one in report.findings] == [
        (Severity.WARNING, "the check itself failed: ZeroDivisionError")
    ]
    assert "the check probe of here is broken" in caplog.text


async def test_an_answer_is_asked_for_once() -> None:
    """Every waiter gets it, and giving up does not take it from the others."""
    asked: list[int] = []
    release = asyncio.Event()

    async def ask() -> int:
        asked.append(1)
        await release.wait()
        return 42

    async with SharedAnswers() as answers:
        hasty = asyncio.create_task(answers.ask_once("x", ask), name="hasty")
        patient = asyncio.create_task(answers.ask_once("x", ask), name="patient")
        await asyncio.sleep(0)
        hasty.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hasty
        release.set()
        assert await patient == 42
    assert asked == [1]


async def test_leaving_ends_what_is_being_asked() -> None:
    """No task survives the visit."""
    ended = asyncio.Event()

    async def ask() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with SharedAnswers() as answers:
        asking = asyncio.create_task(answers.ask_once("x", ask), name="asking")
        await asyncio.sleep(0.001)
    assert ended.is_set()
    with pytest.raises(asyncio.CancelledError):
        await asking
