"""The load report in a response header."""

from __future__ import annotations

import pytest

from kvproxy.clients.orca import OrcaLoad, parse_orca


@pytest.mark.parametrize(
    "value",
    [
        b'JSON {"named_metrics": {"num_requests_waiting":2.0,"kv_cache_usage_perc":0.5}}',
        b"TEXT named_metrics.num_requests_waiting=2.0, named_metrics.kv_cache_usage_perc=0.5",
    ],
)
def test_both_forms_say_the_same(value: bytes) -> None:
    """JSON and TEXT are one report."""
    assert parse_orca(value) == OrcaLoad(waiting=2.0, kv_usage=0.5)


@pytest.mark.parametrize("value", [b"", b"XML <a/>", b"JSON", b"JSON {", b"JSON []", b'JSON {"named_metrics": 1}'])
def test_anything_else_is_no_report(value: bytes) -> None:
    """A header is never trusted."""
    assert parse_orca(value) is None


def test_what_cannot_be_read_is_left_out() -> None:
    """A bad pair does not spoil the others."""
    assert parse_orca(b"TEXT a, num_requests_waiting=x, kv_cache_usage_perc=nan") == OrcaLoad(None, None)
    assert parse_orca(b'JSON {"named_metrics": {"other": 1}}') == OrcaLoad(None, None)
