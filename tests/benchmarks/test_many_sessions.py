"""How the clients of `benchmarks.many_sessions` judge what they get."""

from __future__ import annotations

import pytest

from benchmarks.many_sessions import is_expected, judge

STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"


@pytest.mark.parametrize(
    ("whole", "ended", "expected"),
    [
        (STREAM + b": waiting for an engine\n\ndata: {}\n\ndata: [DONE]\n\n", "answered", True),
        (STREAM + b"data: {}\n\ndata: [DONE]\n\ndata: [DONE]\n\n", "cut", False),
        (STREAM + b"data: {}\n\n", "cut", False),
        (STREAM + b'data: {"error":{"code":"upstream_reset"}}\n\n', "cut with an error event", True),
        (STREAM + b'data: {"error":{"code":"queue_full"}}\n\n', "refused queue_full", True),
        (b"", "no answer", False),
    ],
    ids=["answered", "twice", "cut", "event", "refused late", "nothing"],
)
def test_an_end_is_read_from_all_that_came(whole: bytes, ended: str, expected: bool) -> None:
    """A whole answer ends once; a cut one without an event is never expected."""
    assert judge(whole).ended == ended
    assert is_expected(ended) is expected


def test_a_refusal_has_the_time_to_come_again() -> None:
    """From its header."""
    answer = judge(b'HTTP/1.1 429 Too Many\r\nretry-after: 17\r\n\r\n{"error":{"code":"queue_full"}}')
    assert (answer.ended, answer.retry_after_s) == ("refused queue_full", 17.0)
