"""The rest of a chat whose text the engine parses: another engine renders the chat, generates token ids behind those
that came, and derenders them into chunks with tool calls and reasoning, as if it had made the whole answer (vLLM with
`--enable-scale-out`)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec

from kvproxy.base.errors import UpstreamDisconnected, UpstreamError
from kvproxy.base.upstream.response import UpstreamResponse
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.cluster.pick import Pick
from kvproxy.features.resume.asked_once import AskedOnce
from kvproxy.features.resume.asked_part import fail_at_once, fetch_part
from kvproxy.features.resume.events import DONE, read_data, split_events
from kvproxy.features.resume.mismatch import Mismatch
from kvproxy.features.resume.text_leg import less_kept
from kvproxy.proxy.request.continuation import AsksEngines

Answer = tuple[UpstreamResponse, int, bytes]
#: Posts to the derender route.
Derender = Callable[[bytes], Awaitable[bytes]]

_CHAT = b"/v1/chat/completions"
_GENERATE = b"/inference/v1/generate"
_RENDER = b"/render"
_DERENDER = b"/derender"


class Came(NamedTuple):
    """The part of a chat's answer that came: its token ids and where its chunks ended. The leg begins behind `kept` of
    them; those after are computed again."""

    prompt_ids: bytes  # a JSON array
    ids: tuple[int, ...]
    ends: tuple[int, ...]
    call_ids: tuple[str, ...]  # of the tool calls that began
    kept: int


class _Rendered(msgspec.Struct):
    token_ids: list[int]
    sampling_params: dict[str, Any]


class _Generated(msgspec.Struct):
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    usage: dict[str, Any] | None = None  # of a chunk


class _Chunk(msgspec.Struct):
    choices: list[_Generated] = []
    usage: dict[str, Any] | None = None


class _Choice(msgspec.Struct):
    delta: dict[str, Any] = {}
    finish_reason: str | None = None


class _ChatChunk(msgspec.Struct):
    choices: list[_Choice] = []


class _Derendered(msgspec.Struct):
    chunk: _ChatChunk


_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_decode_chunk = msgspec.json.Decoder(_Chunk).decode
_decode_derendered = msgspec.json.Decoder(_Derendered).decode
_encode = msgspec.json.encode


class Derenderers(AskedOnce[bool]):
    """Entered, it tries each engine at its first chat on a route with `resume`, and once more after a while if the
    engine did not answer as one that derenders."""

    def has_route(self, model: str, endpoint: Endpoint) -> bool:
        """Return whether the engine derenders chats."""
        return bool(self.look_up(str(endpoint.engine.id), self._try(model, endpoint)))

    async def _try(self, model: str, endpoint: Endpoint) -> bool | None:
        chat = {"model": model, "messages": [{"role": "user", "content": "."}]}
        body = _encode({"model": model, "generate_response": {"choices": []}, "chat_request": chat})
        try:
            await self.fetch(endpoint, b"POST", _CHAT + _DERENDER, body)
        except UpstreamError:
            return None
        return True


class DerenderedLeg:
    """The leg of one chat: SplitsLeg. `target` and `chat` are those of its first request."""

    def __init__(self, came: Came, target: bytes, chat: bytes) -> None:
        self._came = came
        self._path = target.partition(b"?")[0]
        self._chat = chat

    def split(self, request: AsksEngines, pick: Pick) -> Coroutine[None, None, Answer]:
        """As of SplitsLeg. The answer has the events of a chat, with the token ids of each chunk."""
        return self._ask(request, pick)

    async def _ask(self, request: AsksEngines, pick: Pick) -> Answer:
        try:
            rendered = await fetch_part(request, pick, self._path + _RENDER, self._chat, refusal="derender")
            body = _continue(rendered, self._came)
        except Mismatch as error:
            return fail_at_once(error)
        response, status, first = await request.ask(pick, self._path.replace(_CHAT, _GENERATE), body)
        if status != 200:
            return response, status, first
        derender = partial(fetch_part, request, pick, self._path + _DERENDER, refusal="derender")
        return Derendering(derender, response, first, came=self._came, chat=self._chat).response, status, b""


def _continue(rendered: bytes, came: Came) -> bytes:
    """Return the request that generates the rest, of what the engine made of the chat. Raises Mismatch."""
    try:
        members = msgspec.json.decode(rendered, type=dict[str, msgspec.Raw])
        known = msgspec.json.decode(rendered, type=_Rendered)
    except _UNREADABLE:
        raise Mismatch("its rendering cannot be read", refusal="derender") from None
    if known.token_ids != msgspec.json.decode(came.prompt_ids):
        raise Mismatch("it renders the chat differently")
    sampling = known.sampling_params
    if sampling.get("structured_outputs"):
        raise Mismatch("a grammar would begin again", refusal="guided")
    counts = {name: count for name in ("max_tokens", "min_tokens") if isinstance(count := sampling.get(name), int)}
    left = {**sampling, **less_kept(counts, came.kept)}
    made = {"token_ids": [*known.token_ids, *came.ids[: came.kept]], "sampling_params": left, "stream": True}
    return _encode({**members, **made})


class Derendering:
    """Source of the response that the relay reads: chunks of generated tokens become those of a chat. Tokens that come
    while a request is on its way go with the next one."""

    def __init__(
        self, derender: Derender, generated: UpstreamResponse, first: bytes, *, came: Came, chat: bytes
    ) -> None:
        loop = asyncio.get_running_loop()
        self.response = UpstreamResponse(self, loop, status=generated.status, headers=generated.headers)
        self._post = derender
        self._generated = generated
        self._again = len(came.ids) - came.kept  # tokens that the client has the text of
        self._ids = list(came.ids)
        self._lengths = [end - start for start, end in pairwise((0, *came.ends))]
        self._call_ids = list(came.call_ids)
        self._fixed = {
            "stream": True,
            "prompt_token_ids": msgspec.Raw(came.prompt_ids),
            "chat_request": msgspec.Raw(chat),
        }
        self._made = b""
        self._taken = asyncio.Event()
        self._task = loop.create_task(self._run(first), name="derender a chat")

    def take(self) -> bytes | None:
        """As of Source."""
        made = self._made
        self._made = b""
        self._taken.set()
        return made or None

    def cancel(self) -> None:
        """As of Source."""
        self._task.cancel()
        self._generated.abort()
        self.response.fail(UpstreamDisconnected("given up by the proxy"), rest=self._made)

    async def _run(self, piece: bytes) -> None:
        response = self.response
        try:
            await self._derender_all(piece)
        except UpstreamError as error:
            response.fail(error, rest=self._made)
        except _UNREADABLE:
            response.fail(Mismatch("its events cannot be read", refusal="derender"), rest=self._made)
        else:
            response.finish(self._made)
        finally:
            self._generated.abort()
            if not response.complete and response.error is None:
                response.fail(UpstreamDisconnected("no chunks could be made"), rest=b"")

    async def _derender_all(self, piece: bytes) -> None:
        generated = self._generated
        held = b""
        while piece or not generated.complete:
            events, held = split_events(held + piece)
            self._made += await self._derender(events)
            self._taken.clear()
            if self._made:
                self.response.wake()
                await self._taken.wait()
            piece = await generated.next_chunk()

    async def _derender(self, events: list[bytes]) -> bytes:
        """Return the events of a chat for these of a generation."""
        made = bytearray()
        tokens = _Generated()
        for event in events:
            data = read_data(event)
            chunk = _decode_chunk(data) if data and data != DONE else _Chunk()
            for choice in chunk.choices:
                ids = [*(tokens.token_ids or ()), *(choice.token_ids or ())]
                tokens = _Generated(ids, choice.finish_reason, choice.stop_reason, chunk.usage)
            if not chunk.choices:
                made += await self._make_event(tokens) + event
                tokens = _Generated()
        return bytes(made + await self._make_event(tokens))

    async def _make_event(self, tokens: _Generated) -> bytes:
        ids = tokens.token_ids
        if not ids and tokens.finish_reason is None:
            return b""
        new = (ids or [])[self._again :]
        self._again -= len(ids or ()) - len(new)
        choice = _Choice()
        if new or tokens.finish_reason is not None:
            choice = await self._ask(new, tokens)
        made = {"index": 0, "delta": _without_absent(choice.delta), "logprobs": None}
        made |= {"finish_reason": choice.finish_reason, "token_ids": ids}
        if choice.finish_reason is not None:
            made["stop_reason"] = tokens.stop_reason
        usage = {} if tokens.usage is None else {"usage": tokens.usage}
        return b"data: " + _encode({"choices": [made], **usage}) + b"\n\n"

    async def _ask(self, new: list[int], tokens: _Generated) -> _Choice:
        """Return what new tokens add to the answer."""
        # The text of an answer has nothing of the token that ends it.
        shown = new[:-1] if tokens.finish_reason == "stop" else new
        choice = {"index": 0, "token_ids": shown, "finish_reason": tokens.finish_reason}
        state = {
            "output_token_ids": self._ids,
            "output_chunk_lens": self._lengths,
            "role_sent": True,
            "tools_streamed": bool(self._call_ids),
            "last_tool_call_ids": self._call_ids,
        }
        body = {**self._fixed, "generate_chunk": {"choices": [choice]}, "stream_state": state}
        found = _decode_derendered(await self._post(_encode(body))).chunk.choices
        self._ids += shown
        if shown:
            self._lengths.append(len(shown))
        made = found[0] if found else _Choice()
        named = [call.get("id") for call in made.delta.get("tool_calls") or ()]
        self._call_ids += [name for name in named if name and name not in self._call_ids]
        return made


def _without_absent(value: Any) -> Any:
    """Return a value without members that are null, as streams leave them out."""
    if isinstance(value, Mapping):
        return {name: _without_absent(one) for name, one in value.items() if one is not None}
    return [_without_absent(one) for one in value] if isinstance(value, list) else value
