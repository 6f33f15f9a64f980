"""A handle: once, with its body, within its lease."""

from __future__ import annotations

import copy
import pickle

import pytest

from kvproxy.features.disaggregation.handle import Handle, HandleRefused

BODY = b'{"prompt":"x"}'
MEMBER = b'"kv_transfer_params":{},'


def made(lease_s: float = 30.0) -> Handle:
    return Handle(MEMBER, BODY, lease_s=lease_s, now=100.0)


def test_it_is_used_once() -> None:
    """The second time blocks may hold another prompt, and the engine answers 200."""
    handle = made()
    assert handle.take(BODY, 101.0) == MEMBER
    with pytest.raises(HandleRefused, match="used"):
        handle.take(BODY, 101.0)


def test_it_is_used_with_the_body_that_was_prefilled() -> None:
    """Even one byte more may be another prompt. It is void after that."""
    handle = made()
    with pytest.raises(HandleRefused, match="other_body"):
        handle.take(BODY + b" ", 101.0)
    with pytest.raises(HandleRefused, match="used"):
        handle.take(BODY, 101.0)


@pytest.mark.parametrize(("after_s", "expired"), [(23.9, False), (24.0, True), (36.0, True)])
def test_it_ends_before_the_engines_lease(after_s: float, expired: bool) -> None:
    """By a fifth, for the way to the decoder."""
    handle = made()
    if expired:
        with pytest.raises(HandleRefused, match="expired"):
            handle.take(BODY, 100.0 + after_s)
    else:
        assert handle.take(BODY, 100.0 + after_s) == MEMBER


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_it_cannot_be_copied(copied: object) -> None:
    """Neither by a retry nor by a log."""
    assert callable(copied)
    with pytest.raises(TypeError, match="cannot be copied"):
        copied(made())


def test_its_text_does_not_show_the_parameters() -> None:
    """Nothing reads them but `take`."""
    assert "kv_transfer_params" not in repr(made())
