"""Chat that vLLM makes of a request to `/v1/messages`, for engines that do not render these themselves. Pure.

As `anthropic/serving.py` of vLLM 0.32 does it. Requests that depend on the chat template or on a hidden setting (system
messages in the middle, results that an assistant reports) are refused: no tokens are better than wrong ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Raw

NO_RAW = Raw()
_HEADER = "x-anthropic-billing-header"
#: Fields that a chat has under the same name.
_KEPT = ("model", "chat_template_kwargs")
_EMPTY_OBJECT = Raw(b"{}")


class Block(msgspec.Struct, gc=False):
    """A content block of any type."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: Raw = NO_RAW
    tool_use_id: str | None = None
    content: Raw = NO_RAW


class _Message(msgspec.Struct, gc=False):
    role: str
    content: str | list[Block]


class MessagesTool(msgspec.Struct, gc=False):
    name: str
    input_schema: Raw
    description: str | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


class _Schema(msgspec.Struct, gc=False):
    type: Raw = NO_RAW


class _Thinking(msgspec.Struct, gc=False):
    type: str


class _OutputConfig(msgspec.Struct, gc=False):
    effort: str | None = None


class MessagesBody(msgspec.Struct, gc=False):
    messages: list[_Message]
    system: str | list[Block] | None = None
    tools: list[MessagesTool] | None = None
    thinking: _Thinking | None = None
    output_config: _OutputConfig | None = None
    model: Raw = NO_RAW
    chat_template_kwargs: Raw = NO_RAW


decode_messages = msgspec.json.Decoder(MessagesBody).decode
_decode_schema = msgspec.json.Decoder(_Schema).decode
_decode_blocks = msgspec.json.Decoder(list[Block]).decode
Chat = dict[str, Any]


def chat_of_messages(body: bytes) -> bytes:
    """Return the chat body with the same prompt. Raises ValueError for an invalid or unsupported body."""
    try:
        request = decode_messages(body)
        chat: Chat = {name: value for name in _KEPT if (value := getattr(request, name)) is not NO_RAW}
        chat["messages"] = _messages(request)
        if request.tools is not None:
            chat["tools"] = [_tool(tool) for tool in request.tools]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise ValueError("not a request for messages of text") from None
    effort = _effort(request)
    return msgspec.json.encode(chat if effort is None else {**chat, "reasoning_effort": effort})


def _effort(request: MessagesBody) -> str | None:
    if request.thinking is not None and request.thinking.type == "disabled":
        return "none"
    return request.output_config.effort if request.output_config is not None else None


def _messages(request: MessagesBody) -> list[Chat]:
    system = _system(request.system)
    messages = request.messages
    if not system and messages and messages[0].role == "system":
        system = _system(messages[0].content)
        messages = messages[1:]
    made: list[Chat] = [{"role": "system", "content": system}] if system else []
    for message in messages:
        if message.role not in ("user", "assistant"):
            raise ValueError("where a later system message goes is the template's business")
        if isinstance(message.content, str):
            made.append({"role": message.role, "content": message.content})
        elif message.role == "user":
            made += _user(message.content)
        else:
            made.append(_assistant(message.content))
    return made


def _system(content: str | list[Block] | None) -> str:
    """One text; blocks that are a billing header are dropped, one in front of a string by the chat itself."""
    if not isinstance(content, list):
        return content or ""
    if any(block.type.startswith("tool_") for block in content):
        raise ValueError("a later message changes the tools")
    texts = [block.text or "" for block in content if block.type == "text"]
    return "".join([text for text in texts if not text.startswith(_HEADER)])


def _user(blocks: Sequence[Block]) -> list[Chat]:
    """Convert a user's blocks: results of tools are messages of their own, before the user's text."""
    made: list[Chat] = []
    for block in blocks:
        if block.type == "tool_result":
            made.append({"role": "tool", "tool_call_id": block.tool_use_id or "", "content": _result(block.content)})
        elif block.type != "text":
            raise ValueError(f"a user's block of type {block.type[:40]!r}")
    said = _texts(blocks)
    return made if said is None else [*made, {"role": "user", "content": said}]


def _result(content: Raw) -> str:
    return "\n".join(read_result(content))


def read_result(content: Raw) -> list[str]:
    if content is NO_RAW or bytes(content) == b"null":
        return []
    if bytes(content).startswith(b'"'):
        return [msgspec.json.decode(content, type=str)]
    blocks = _decode_blocks(content)
    if any(block.type != "text" for block in blocks):
        raise ValueError("a result that is not of text")
    return [block.text or "" for block in blocks]


def _assistant(blocks: Sequence[Block]) -> Chat:
    made: Chat = {"role": "assistant"}
    if any(block.type not in ("text", "thinking", "redacted_thinking", "tool_use") for block in blocks):
        raise ValueError("an assistant's block of another type")
    thoughts = [block.thinking for block in blocks if block.type == "thinking" and block.thinking is not None]
    if thoughts:
        made["reasoning"] = "".join(thoughts)
    calls = [make_call(block) for block in blocks if block.type == "tool_use"]
    if calls:
        made["tool_calls"] = calls
    said = _texts(blocks)
    return made if said is None else {**made, "content": said}


def make_call(block: Block) -> Chat:
    if not block.id:
        raise ValueError("a call without an id gets one of the time")
    given = block.input if block.input is not NO_RAW and bytes(block.input) != b"null" else _EMPTY_OBJECT
    function = {"name": block.name or "", "arguments": bytes(given).decode()}
    return {"id": block.id, "type": "function", "function": function}


def _texts(blocks: Sequence[Block]) -> str | list[Chat] | None:
    """Join texts; a single one is a string."""
    return make_content([block.text for block in blocks if block.type == "text" and block.text])


def make_content(texts: Sequence[str]) -> str | list[Chat] | None:
    if len(texts) > 1:
        return [{"type": "text", "text": text} for text in texts]
    return texts[0] if texts else None


def _tool(tool: MessagesTool) -> Chat:
    function: Chat = {
        "name": tool.name,
        "description": tool.description,
        "parameters": type_schema(tool.input_schema),
        "strict": tool.strict,
        "defer_loading": tool.defer_loading,
    }
    return {"type": "function", "function": function}


def type_schema(schema: Raw) -> Raw:
    """Add the object type to a schema without a type. Its members are not parsed: a client may send any number."""
    if _decode_schema(schema).type is not NO_RAW:
        return schema
    members = bytes(schema)[1:-1].rstrip()
    return Raw(b'{%b%b"type":"object"}' % (members, b"," if members.strip() else b""))
