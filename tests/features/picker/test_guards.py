"""Checks of features before requests that Envoy carries."""

from __future__ import annotations

from kvproxy.base.types import EndpointId, Headers
from kvproxy.features.picker.messages import Message
from kvproxy.proxy.request.error_reply import LocalReply
from kvproxy.proxy.request.exchange import Exchange
from tests.features.picker.support import B, C, chat, destination, running_picker


class Guard:
    """Bars a, refuses bodies with "harm", and replaces ids."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, bytes | None]] = []

    def reads_bodies(self, method: str) -> bool:
        return method == "POST"

    async def examine(self, exchange: Exchange, path: str, headers: Headers, body: bytes | None) -> None:
        self.seen.append((path, body))
        exchange.barred = frozenset({EndpointId("a")})
        exchange.upstream_id = "ours"
        if b"harm" in (body or b""):
            raise LocalReply(400, "shield", "harmful")


def headers_of(mutation: Message) -> dict[str, str]:
    return {one.header.key: one.header.raw_value.decode() for one in mutation.set_headers}


async def test_a_guard_bars_refuses_and_replaces_ids() -> None:
    """Fallbacks included; the client gets its own id back."""
    guard = Guard()
    async with running_picker(picker={"fallbacks": 2}) as picker:
        picker.proxy.generations.current.guards = (guard,)
        envoy = picker.ask(headers={"x-request-id": "mine"})
        picked = await envoy.pick(chat("hello"))
        assert set(destination(picked)) == {B, C}
        assert headers_of(picked.request_body.response.header_mutation)["x-request-id"] == "ours"
        answered = await envoy.answer()
        assert headers_of(answered.response_headers.response.header_mutation)["x-request-id"] == "mine"
        await envoy.finish()
        refused = await picker.ask().pick(chat("harm"))
        assert refused.immediate_response.status.code == 400
        assert picker.in_flight() == {"a": 0, "b": 0, "c": 0}


async def test_bodies_of_other_paths_reach_the_guard() -> None:
    """Though no placement needs them."""
    guard = Guard()
    async with running_picker() as picker:
        picker.proxy.generations.current.guards = (guard,)
        envoy = picker.ask()
        await envoy.say_headers(path="/generate")
        await envoy.hear()
        await envoy.say_body(b'{"text":"x"}')
        assert destination(await envoy.hear())
        assert guard.seen == [("/generate", b'{"text":"x"}')]
