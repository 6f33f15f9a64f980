"""Messages and Responses as the chats that vLLM makes of them, for a template that takes system messages anywhere."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvproxy.lab.simulator.vllm_errors import VllmError

_BILLING_HEADER = "x-anthropic-billing-header"
_EMPTY = {"type": "text", "text": ""}
_SHOWN = ("text", "image", "document")
_TEMPLATE = ("model", "chat_template_kwargs")
Body = Mapping[str, Any]
Chat = dict[str, Any]


def messages_as_chat(body: Body) -> Chat:
    """`/v1/messages`: billing headers and `cache_control` are no part of it, what tools answered has its own role."""
    chat = {name: body[name] for name in _TEMPLATE if body.get(name) is not None}
    system = _system_text(body.get("system"))
    chat["messages"] = [{"role": "system", "content": system}] if system else []
    for message in body["messages"]:
        chat["messages"] += _anthropic_message(message)
    if body.get("tools") is not None:
        chat["tools"] = [_anthropic_tool(tool) for tool in body["tools"]]
    effort = (body.get("output_config") or {}).get("effort")
    if (body.get("thinking") or {}).get("type") == "disabled":
        effort = "none"
    return {**chat, "reasoning_effort": effort} if effort is not None else chat


def _system_text(content: Any) -> str:
    if not isinstance(content, list):
        return content or ""
    texts = [str(block.get("text") or "") for block in content if block.get("type") == "text"]
    return "".join(text for text in texts if not text.startswith(_BILLING_HEADER))


def _anthropic_message(message: Body) -> list[Chat]:
    role = message.get("role")
    blocks = message.get("content")
    if role == "system":
        text = _system_text(blocks)
        return [{"role": role, "content": text}] if text else []
    if not isinstance(blocks, list):
        return [{"role": role, "content": blocks}]
    made: list[Chat] = []
    own: Chat = {"role": role}
    parts = [part for block in blocks if (part := as_part(block)) is not None]
    if parts:
        own["content"] = parts[0]["text"] if len(parts) == 1 and "text" in parts[0] else parts
    thoughts = [block["thinking"] for block in blocks if _is(block, "thinking") and block.get("thinking") is not None]
    if thoughts:
        own["reasoning"] = "".join(thoughts)
    calls = [_anthropic_call(block) for block in _all(blocks, "tool_use")]
    if calls and role == "assistant":
        own["tool_calls"] = calls
    for block in _all(blocks, "tool_result"):
        answered = block.get("content")
        if isinstance(answered, list):
            shown = [as_part(one) or _EMPTY for one in answered if any(_is(one, kind) for kind in _SHOWN)]
            text_alone = all("text" in part for part in shown)
            answered = "\n".join(part["text"] for part in shown) if text_alone else shown
        made.append({"role": "tool", "tool_call_id": block.get("tool_use_id", ""), "content": answered or ""})
    return [*made, own] if role == "assistant" or "content" in own else made


def as_part(block: Any) -> Chat | None:
    """Return the content part that a block of text or a picture is; None for another block, or an empty text."""
    if _is(block, "text"):
        return {"type": "text", "text": str(block["text"])} if block.get("text") else None
    if not _is(block, "image") and not _is(block, "document"):
        return None
    source = block["source"]
    url = source["url"] if source.get("type") == "url" else f"data:{source.get('media_type')};base64,{source['data']}"
    return {"type": "image_url" if _is(block, "image") else "file", "image_url": {"url": url}}


def _anthropic_call(block: Body) -> Chat:
    return _call(block.get("id", ""), block.get("name", ""), json.dumps(block.get("input") or {}))


def _anthropic_tool(tool: Body) -> Chat:
    schema = {**(tool.get("input_schema") or {})}
    schema.setdefault("type", "object")
    return _function(tool.get("name", ""), tool.get("description"), schema)


def responses_as_chat(body: Body) -> Chat:
    """`/v1/responses`, of what is in the request."""
    chat = {name: body[name] for name in _TEMPLATE if body.get(name) is not None}
    chat["messages"] = [{"role": "system", "content": body["instructions"]}] if body.get("instructions") else []
    given = body["input"]
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    first = len(chat["messages"])
    for item in items:
        _append_item(chat["messages"], item, first)
    if body.get("tools"):
        chat["tools"] = [
            _function(tool.get("name", ""), tool.get("description"), tool.get("parameters"))
            for tool in body["tools"]
            if _is(tool, "function")
        ]
    if isinstance(given, list) and given and given[-1].get("status") in ("in_progress", "incomplete"):
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    effort = (body.get("reasoning") or {}).get("effort")
    return {**chat, "reasoning_effort": effort} if effort is not None else chat


def _append_item(messages: list[Chat], item: Body, first: int) -> None:
    """Append an item; an assistant's consecutive texts, thoughts and calls are one message."""
    said = _item(item)
    last = messages[-1] if len(messages) > first and messages[-1]["role"] == "assistant" else None
    if said["role"] != "assistant" or last is None:
        messages.append(said)
        return
    ((name, value),) = [(name, value) for name, value in said.items() if name != "role"]
    if name == "tool_calls":
        last["tool_calls"] = [*last.get("tool_calls", ()), *value]
    elif last.get(name) is None:
        last[name] = value
    else:
        messages.append(said)


def _item(item: Body) -> Chat:
    kind = item.get("type", "message")
    if kind == "function_call":
        return {"role": "assistant", "tool_calls": [_call(item["call_id"], item["name"], item["arguments"])]}
    if kind == "function_call_output":
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": item["output"]}
    if kind == "reasoning":
        texts = item.get("content") or item.get("summary") or [{"text": ""}]
        return {"role": "assistant", "reasoning": texts[0]["text"]}
    if kind != "message" or "role" not in item:
        raise VllmError(f"Unsupported input item type: {kind}", param="input")
    content = item.get("content")
    if item["role"] == "assistant" and isinstance(content, list):
        content = content[0]["text"]
    return {"role": item["role"], "content": content}


def _call(id_: str, name: str, arguments: str) -> Chat:
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


def _function(name: str, description: str | None, parameters: Any) -> Chat:
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _is(block: Any, kind: str) -> bool:
    return isinstance(block, Mapping) and block.get("type") == kind


def _all(blocks: Sequence[Any], kind: str) -> list[Body]:
    return [block for block in blocks if _is(block, kind)]
