"""Live replay against a fake server: the requests sent, and what is made of the answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import pytest

from kvproxy.lab.replay.live import LiveReplay, LiveSettings, NoServer
from kvproxy.lab.replay.results import ReplayOutcome, summarize_outcomes
from kvproxy.lab.replay.settings import Pace, make_block, make_prompt
from tests.lab.replay.traces import chat_trace, shared_prefix_trace

#: What a server may send with a good status.
_ANSWERS = {
    "error": b'data: {"choices": [{"text": "a"}]}\n\ndata: {"error": {"message": "died"}}\n\n',
    "nonsense": b"data: {nonsense\n\n",
    "silence": b"data: [DONE]\n\n",
}


class FakeServer(httpx.AsyncBaseTransport):
    """Streams two tokens and a usage; every fourth request in a way of its own."""

    def __init__(self, *, trouble: str = "", models: httpx.Response | httpx.HTTPError | None = None) -> None:
        self.bodies: list[dict[str, object]] = []
        self.paths: list[str] = []
        self.most_at_once = 0
        self._at_once = 0
        self._models = httpx.Response(200, json={"data": [{"id": "tiny"}]}) if models is None else models
        self.sessions: list[str] = []
        self.authorization: set[str | None] = set()
        self._trouble = trouble

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.authorization.add(request.headers.get("authorization"))
        self.paths.append(request.url.path)
        if request.url.path == "/v1/models":
            if isinstance(self._models, httpx.HTTPError):
                raise self._models
            self._models.request = request
            return self._models
        self.bodies.append(json.loads(await request.aread()))
        self.sessions.append(request.headers["x-session-id"])
        if self._trouble and len(self.bodies) % 4 == 0:
            if self._trouble == "refused":
                raise httpx.ConnectError("refused")
            if self._trouble == "timeout":
                raise httpx.ReadTimeout("slow")
            if self._trouble == "status":
                return httpx.Response(429, headers={"retry-after": "1"})
            if self._trouble in _ANSWERS:
                return httpx.Response(200, content=_ANSWERS[self._trouble])
        cut = self._trouble == "cut" and len(self.bodies) % 4 == 0
        return httpx.Response(
            200, headers={"x-kvproxy-endpoint": f"e{len(self.bodies) % 2}"}, content=self._stream(cut=cut)
        )

    async def _stream(self, *, cut: bool) -> AsyncIterator[bytes]:
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        for _ in range(20):
            await asyncio.sleep(0)  # others get as far as this
        self._at_once -= 1
        yield b'data: {"choices": [{"text": "a"}]}\n\n'
        if cut:
            raise httpx.RemoteProtocolError("cut")
        yield b': comment\n\ndata: {"choices": [{"text": "b"}], "usage": null}\n\n'
        usage = {"prompt_tokens": 1000, "prompt_tokens_details": {"cached_tokens": 400}}
        yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n".encode()


async def played(server: FakeServer, **settings: str) -> tuple[LiveReplay, list[ReplayOutcome]]:
    """Return a few sessions at once, without the trace's pauses."""
    replay = LiveReplay(chat_trace(sessions=3, turns=2), Pace(scale=0.0), LiveSettings("http://proxy/", **settings),
                        transport=server)  # fmt: skip
    return replay, await replay.run()


async def test_every_turn_is_one_streamed_completion() -> None:
    """Of the trace's length, for the server's model, with its session."""
    server = FakeServer()
    replay, outcomes = await played(server)
    assert len(outcomes) == len(server.bodies) == 6
    assert {(body["model"], body["max_tokens"], body["stream"]) for body in server.bodies} == {("tiny", 30, True)}
    assert sorted(set(server.sessions)) == ["replay-0", "replay-1", "replay-2"]
    assert replay.endpoints == ("e1", "e0")


async def test_figures_come_from_the_servers_usage() -> None:
    """Its own count of prompt and cached tokens."""
    _, outcomes = await played(FakeServer())
    summary = summarize_outcomes(outcomes, 2)
    assert (summary.hit_rate, summary.failed) == (0.4, 0)
    assert all(outcome.ttft_s is not None and outcome.ttft_s >= 0 for outcome in outcomes)


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [("refused", "no connection"), ("status", "status 429"), ("cut", "broken off"), ("timeout", "timeout"),
     ("error", "error event"), ("nonsense", "unreadable answer"), ("silence", "empty answer")],
)  # fmt: skip
async def test_failures_are_counted_and_the_rest_goes_on(trouble: str, reason: str) -> None:
    """By its reason, however far it came; a stream that tells of an error is no answer."""
    replay, outcomes = await played(FakeServer(trouble=trouble))
    assert summarize_outcomes(outcomes, 2).failed == 1
    assert len(outcomes) == 6
    assert replay.failures == {reason: 1}


async def test_requests_under_way_are_bounded() -> None:
    """A request that comes before a place is free waits here, and the output shows it."""
    server = FakeServer()
    replay = LiveReplay(chat_trace(sessions=5, turns=1), Pace(scale=0.0), LiveSettings("http://proxy", concurrency=2),
                        transport=server)  # fmt: skip
    await replay.run()
    assert server.most_at_once <= 2
    assert replay.held_back == 3


async def test_an_open_loop_waits_for_nobody() -> None:
    """Turns come at the trace's times, also while the one before is unanswered."""
    trace = chat_trace(sessions=1, turns=3)
    server = FakeServer()
    replay = LiveReplay(trace, Pace(scale=0.0, closed_loop=False), LiveSettings("http://proxy"), transport=server)
    await replay.run()
    assert server.most_at_once == 3
    assert {body["max_tokens"] for body in server.bodies} == {30}
    closed = FakeServer()
    await LiveReplay(trace, Pace(scale=0.0), LiveSettings("http://proxy"), transport=closed).run()
    assert closed.most_at_once == 1


@pytest.mark.parametrize("url", ["http://proxy", "http://proxy/", "http://proxy/v1", "http://proxy/v1/"])
async def test_the_url_may_end_with_the_apis_version(url: str) -> None:
    """As clients of OpenAI's API write it."""
    server = FakeServer()
    await LiveReplay(chat_trace(sessions=1, turns=1), Pace(scale=0.0), LiveSettings(url), transport=server).run()
    assert server.paths == ["/v1/models", "/v1/completions"]


@pytest.mark.parametrize(
    ("models", "message"),
    [(httpx.Response(200, json={"data": []}), "lists no models"),
     (httpx.Response(200, text="hello"), "lists no models"),
     (httpx.Response(401), "answers 401"), (httpx.ConnectError("refused"), "cannot be reached")],
)  # fmt: skip
async def test_without_a_model_nothing_is_sent(models: httpx.Response | httpx.HTTPError, message: str) -> None:
    """The reason is said."""
    server = FakeServer(models=models)
    with pytest.raises(NoServer, match=message):
        await played(server)
    assert server.bodies == []


async def test_model_and_key_are_as_given() -> None:
    """Then the server is not asked for its models."""
    server = FakeServer()
    await played(server, model="mine", api_key="secret")
    assert {body["model"] for body in server.bodies} == {"mine"}
    assert server.authorization == {"Bearer secret"}


async def test_progress_counts_requests() -> None:
    """Failed ones too."""
    seen: list[int] = []
    replay = LiveReplay(chat_trace(sessions=1, turns=2), Pace(scale=0.0), LiveSettings("http://proxy"),
                        transport=FakeServer(trouble="status"), progress=seen.append)  # fmt: skip
    await replay.run()
    assert seen == [1, 2]


def test_equal_blocks_are_equal_text_and_others_differ_at_once() -> None:
    """So that a tokenizer's blocks line up like the trace's."""
    assert make_block(7, 64) == make_block(7, 64)
    texts = [make_block(block, 64) for block in range(5000)]
    assert len({" ".join(text.split()[:4]) for text in texts}) == 5000
    assert {len(text.split()) for text in texts} == {64}


def test_prompts_share_exactly_their_common_blocks() -> None:
    """Two requests with one prefix begin alike for as long as their blocks do, and end apart."""
    turns = [session.turns[0] for session in shared_prefix_trace().sessions]
    first = turns[0]
    second = next(turn for turn in turns[1:] if turn.blocks[0] == first.blocks[0])
    one, two = make_prompt(first, 512).split(), make_prompt(second, 512).split()
    assert len(one) == first.prompt_tokens
    common = next(index for index, pair in enumerate(zip(one, two, strict=True)) if pair[0] != pair[1])
    assert 5 * 512 <= common < 5 * 512 + 8
