"""Answers whose chunks have several tokens each: the last one may be a part of a character."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.features.resume.gateway import CHAT, FILTERS, chat_body, text_of
from tests.support.loopback import serve
from tests.support.proxy import running_proxy

PROMPT = [1, 2, 3]
#: Tokens of one answer, and the text that comes once each is there.
ANSWER = [(10, "The"), (11, " sea"), (12, " is"), (13, ""), (14, "海"), (15, " and"), (16, " wide"), (17, ".")]
WORDS = "".join(text for _, text in ANSWER)
IDS = [token for token, _ in ANSWER]


def make_event(choice: dict[str, Any], **more: Any) -> str:
    """Return a chunk of either API."""
    whole = {"id": "x", "object": "o", "created": 1, "model": "tiny", "choices": [{"index": 0, **choice}], **more}
    return f"data: {json.dumps(whole)}\n\n"


class Vllm:
    """Its first chat breaks off behind so many tokens, which came as one chunk. Behind half a character the first text
    of an answer is that of the prompt, as of vLLM 0.32."""

    def __init__(self, came: int, *, detokenizes: bool = True) -> None:
        routes = [Route(CHAT, self._chat, methods=["POST"]), Route("/v1/completions", self._go_on, methods=["POST"])]
        if detokenizes:
            routes.append(Route("/detokenize", self._detokenize, methods=["POST"]))
        self.app = Starlette(routes=routes)
        self._came = came

    async def _chat(self, request: Request) -> Response:
        asked = await request.json()
        assert asked["return_token_ids"]
        text = "".join(word for _, word in ANSWER[: self._came])
        events = [
            make_event({"delta": {"role": "assistant", "content": ""}}, prompt_token_ids=PROMPT),
            make_event({"delta": {"content": text}, "token_ids": IDS[: self._came]}),
        ]
        return StreamingResponse(iter(events), media_type="text/event-stream")

    async def _go_on(self, request: Request) -> Response:
        kept = (await request.json())["prompt"][len(PROMPT) :]
        assert kept == IDS[: len(kept)]
        events = [make_event({"text": text, "token_ids": [token]}) for token, text in ANSWER[len(kept) :]]
        if kept and kept[-1] == 13:
            events[0] = make_event({"text": "Be kind. The sea is海", "token_ids": [14]})
        events.append(make_event({"text": "", "finish_reason": "stop", "token_ids": []}))
        return StreamingResponse(iter([*events, "data: [DONE]\n\n"]), media_type="text/event-stream")

    async def _detokenize(self, request: Request) -> Response:
        tokens = (await request.json())["tokens"]
        return JSONResponse({"prompt": WORDS if tokens[-1] != 13 else "The sea is \N{REPLACEMENT CHARACTER}"})


async def ask(came: int, *, detokenizes: bool = True, **fields: Any) -> tuple[str, str]:
    """Return the words that a client gets, and why they end early."""
    one, other = Vllm(came), Vllm(came, detokenizes=detokenizes)
    config = {"filters": FILTERS, "routes": [{"resume": "exact"}]}
    async with serve(one.app) as a, serve(other.app) as b, running_proxy({"a": a, "b": b}, **config) as proxy:
        answer: httpx.Response = await proxy.client.post(CHAT, json=chat_body(**fields))
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        return text_of(events), events[-1].get("error", {}).get("code", "")


@pytest.mark.parametrize("came", [3, 5, 7])
async def test_a_sampled_answer_goes_on_behind_a_whole_character(came: int) -> None:
    """The engine that goes on tells the text of the last tokens first."""
    assert await ask(came, temperature=1) == (WORDS, "")


@pytest.mark.parametrize("detokenizes", [True, False])
async def test_a_sampled_answer_does_not_go_on_within_a_character(detokenizes: bool) -> None:
    """Its next words would be those of the prompt, system message included."""
    assert await ask(4, detokenizes=detokenizes, temperature=1) == ("The sea is", "resume_mismatch")


async def test_a_greedy_answer_begins_anew() -> None:
    """Where no place is known to be one between two characters."""
    assert await ask(4) == (WORDS, "")
