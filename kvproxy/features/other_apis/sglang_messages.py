"""Chat that SGLang 0.5.23 makes of a request to `/v1/messages`, which it does not render itself. Pure.

Unlike in vLLM's, a billing header stays, as do empty texts and the order of a user's texts and results. Inputs that its
template decides on (thoughts, later system messages) are refused: no tokens are better than wrong ones."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvproxy.features.other_apis.messages_chat import (
    NO_RAW,
    Block,
    Chat,
    MessagesBody,
    MessagesTool,
    decode_messages,
    make_call,
    make_content,
    read_result,
    type_schema,
)


def sglang_chat_of_messages(body: bytes) -> bytes:
    """Return the chat body with the same prompt. Raises ValueError for an invalid or unsupported body."""
    try:
        request = decode_messages(body)
        chat: Chat = {"messages": _messages(request)}
        if request.model is not NO_RAW:
            chat["model"] = request.model
        if request.tools:
            chat["tools"] = [_tool(tool) for tool in request.tools]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise ValueError("not a request for messages of text") from None
    if request.thinking is not None:
        raise ValueError("the template decides on thinking")
    effort = None if request.output_config is None else request.output_config.effort
    if effort is not None:
        chat["reasoning_effort"] = "max" if effort == "xhigh" else effort
    return msgspec.json.encode(chat)


def _messages(request: MessagesBody) -> list[Chat]:
    system = request.system
    if isinstance(system, list):
        system = "\n".join([block.text for block in system if block.type == "text" and block.text])
    elif system is not None and not system.strip():
        system = None
    made: list[Chat] = [{"role": "system", "content": system}] if system else []
    for message in request.messages:
        if message.role not in ("user", "assistant"):
            raise ValueError("where a later system message goes is the template's business")
        if isinstance(message.content, str):
            made.append({"role": message.role, "content": message.content})
        else:
            made += _blocks(message.role, message.content)
    return made


def _blocks(role: str, blocks: Sequence[Block]) -> list[Chat]:
    made: list[Chat] = []
    texts: list[str] = []
    calls: list[Chat] = []
    for block in blocks:
        if block.type == "text":
            texts += [] if block.text is None else [block.text]
        elif block.type == "tool_use":
            calls.append(make_call(block))
        elif block.type == "tool_result" and role == "user":
            if texts:
                made.append({"role": role, "content": make_content(texts)})
                texts = []
            result = make_content([text for text in read_result(block.content) if text]) or ""
            made.append({"role": "tool", "tool_call_id": block.tool_use_id or block.id or "", "content": result})
        else:
            raise ValueError(f"a block of type {block.type[:40]!r}")
    last: Chat = {"role": role, "tool_calls": calls} if calls else {"role": role}
    if texts:
        made.append({**last, "content": make_content(texts)})
    elif calls or role == "assistant":
        made.append(last if calls else {**last, "content": ""})
    return made


def _tool(tool: MessagesTool) -> Chat:
    function: Chat = {
        "name": tool.name,
        "description": tool.description or "",
        "parameters": type_schema(tool.input_schema),
        "strict": bool(tool.strict),
    }
    deferred: Chat = {} if tool.defer_loading is None else {"defer_loading": tool.defer_loading}
    return {"type": "function", "function": function, **deferred}
