"""The demo that kills an engine."""

from __future__ import annotations

import io

from kvproxy.lab.demo.kill import WatchedStream, _print_result, run_kill


async def test_every_client_gets_the_answer_of_an_undisturbed_run() -> None:
    """Those whose engine died, too."""
    out = io.StringIO()
    assert await run_kill(4, out) == 0
    assert "2 of them had begun at a and went on at b" in out.getvalue()
    assert "4 of 4 clients" in out.getvalue()


def test_a_client_with_another_answer_fails_the_demo() -> None:
    """So does one with an error."""
    good, other, failed = (WatchedStream(number) for number in range(3))
    other.pause_s = 0.25
    other.text = "other"
    failed.error = "dead"
    out = io.StringIO()
    assert _print_result([good, other, failed], [WatchedStream(9)] * 3, out) == 1
    assert "1 of 3 clients" in out.getvalue()
    assert "longest time without a token: 250 ms, undisturbed 0 ms" in out.getvalue()
