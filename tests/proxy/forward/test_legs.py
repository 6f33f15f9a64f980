"""Requests in legs, as the forwarder has them: who splits one, and what goes whole."""

from __future__ import annotations

from typing import Any, cast

from kvproxy.proxy.forward.engine_request import EngineRequest
from kvproxy.proxy.forward.request_body import RequestBody
from kvproxy.proxy.request.continuation import Leg


def test_the_rest_of_a_stream_goes_to_one_endpoint() -> None:
    """Its prompt is not the client's, and another kind of request may ask for it."""
    nothing: Any = None
    body = RequestBody(nothing, nothing, b"{}")
    splits = cast("Any", object())
    request = EngineRequest(
        nothing, nothing, nothing, nothing, b"POST", b"/a", nothing, body, None, nothing, legs=splits
    )
    rest = request.with_leg(Leg(b"/b", b'{"x":1}'))
    assert rest.legs is None
    assert (rest.target, rest.body.whole) == (b"/b", b'{"x":1}')
    assert request.legs is splits
