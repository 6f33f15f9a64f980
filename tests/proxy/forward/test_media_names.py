"""Names that clients give their media: no tenant reaches another one's picture by them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvproxy.base.json_scan import MAX_DECODED_BYTES, find_members, run_at_once
from kvproxy.base.types import RequestKind
from kvproxy.proxy.forward.body_guard import BodySanitizer, is_guarded, tenant_salt
from kvproxy.proxy.request.body import BodyUnchecked
from kvproxy.proxy.request.exchange import Exchange
from kvproxy.proxy.request.parse import parse_body


def sent_by(tenant: str = "", *, trusted: bool = False, isolated: bool = False) -> Exchange:
    exchange = Exchange(received_at=0.0)
    exchange.tenant, exchange.trusted, exchange.isolated = tenant, trusted, isolated
    return exchange


async def checked(body: bytes, exchange: Exchange) -> bytes:
    """Return the same by one parse of the body and from the members that a scan found on the way."""
    clean = await BodySanitizer().checked(body, exchange, [])
    exchange.members = run_at_once(find_members(body, is_guarded))
    assert await BodySanitizer().checked(body, exchange, []) == clean
    return clean


def chat(part: bytes) -> bytes:
    return b'{"model":"m", "messages":[{"role":"user","content":[%b,{"type":"text","text":"caf\\u00e9"}]}]}' % part


PICTURE = b'{"type":"image_url","image_url":{"url":"data:,x"}%b}'


@pytest.mark.parametrize(
    ("part", "left"),
    [
        (PICTURE % b',"uuid":"a"', PICTURE % b""),
        (PICTURE % b' , "uuid" : null', PICTURE % b""),
        (PICTURE % b',"uuid":"a","x":1,"uuid":"b"', PICTURE % b',"x":1'),
        (PICTURE % b',"u\\u0075id":"a"', PICTURE % b""),
        (b'{"uuid":"a","image_url":null}', b'{"image_url":null}'),
        (
            b'{"image_url":{"url":"u","content_hash":"sha256:0"},"type":"image_url"}',
            b'{"image_url":{"url":"u"},"type":"image_url"}',
        ),
        (
            b'{"type":"tool_result","content":[{"type":"image","source":{"data":"","uuid":"x"},"uuid":"y"}]}',
            b'{"type":"tool_result","content":[{"type":"image","source":{"data":""}}]}',
        ),
        (
            b'{"type":"image_embeds","mm_hashes":["a"],"image_embeds":"AA"}',
            b'{"type":"image_embeds","image_embeds":"AA"}',
        ),
    ],
)
async def test_names_of_media_are_cut_out_of_content_parts(part: bytes, left: bytes) -> None:
    """At any depth, in every spelling a parser takes, duplicates too; every other byte stays."""
    assert not BodySanitizer().passes(chat(part), sent_by())
    assert await checked(chat(part), sent_by()) == chat(left)


@pytest.mark.parametrize(
    ("body", "left"),
    [
        (b'{"mm_hashes":["a"],"text":"x","mm_content_hashes":["b"]}', b'{"text":"x"}'),
        (b'{"image_data":[{"url":"u","content_hash":"c"}],"text":"x"}', b'{"image_data":[{"url":"u"}],"text":"x"}'),
        (b'{"features":{"mm_hashes":{"image":["a"]},"x":1}}', b'{"features":{"x":1}}'),
        (
            b'{"input":[{"content":[{"type":"input_image","uuid":"a"}]}]}',
            b'{"input":[{"content":[{"type":"input_image"}]}]}',
        ),
        (b'{"input":[{"output":[{"uuid":"a"}]}]}', b'{"input":[{"output":[{}]}]}'),
        (b'{"data_1":{"image_url":{"url":"u"},"uuid":"a"}}', b'{"data_1":{"image_url":{"url":"u"}}}'),
        (b'{"documents":{"content":[{"uuid":"a"}]}}', b'{"documents":{"content":[{}]}}'),
    ],
)
async def test_other_apis_have_them_elsewhere(body: bytes, left: bytes) -> None:
    """SGLang's own, rendered prompts, Responses, scores and reranking."""
    assert await checked(body, sent_by()) == left


@pytest.mark.parametrize(
    "body",
    [
        b'{"tools":[{"function":{"parameters":{"properties":{"uuid":{"type":"string"}}}}}],"messages":[]}',
        b'{"messages":[{"role":"assistant","content":[{"type":"tool_use","input":{"uuid":"a","x":[{"uuid":"b"}]}}]}]}',
        b'{"messages":[{"role":"user","content":"the \\"uuid\\" of it, and \\u0061"}]}',
        b'{"documents":[{"uuid":"a","text":"x"}],"metadata":{"uuid":"b"},"uuid":"c"}',
        b'["uuid"]',
    ],
)
async def test_the_same_words_elsewhere_stay(body: bytes) -> None:
    """Schemas of tools, arguments of calls, text and documents are prompts, and name nothing."""
    assert await BodySanitizer().checked(body, sent_by(), []) == body


async def test_a_tenants_uuid_is_its_own() -> None:
    """Equal for the same tenant, so that the picture need not be sent again; another one's is another."""
    body = chat(PICTURE % b',"uuid":"logo"')
    names = []
    for tenant in ("alice", "bob", "alice"):
        clean = await checked(body, sent_by(tenant))
        salt = tenant_salt(tenant, "logo")
        assert clean == chat(PICTURE % b',"uuid":"%b"' % salt.encode())
        names.append(salt)
    assert names[0] == names[2] != names[1]


async def test_an_isolated_tenants_body_is_salted_too() -> None:
    """Also where the salt alone would have been put in front."""
    body = chat(PICTURE % b',"uuid":"logo","content_hash":"x"')
    document = json.loads(await BodySanitizer().checked(body, sent_by("alice", isolated=True), []))
    [picture, _] = document["messages"][0]["content"]
    assert document["cache_salt"] == tenant_salt("alice", None)
    assert picture["uuid"] == tenant_salt("alice", "logo")
    assert "content_hash" not in picture


async def test_a_trusted_client_names_its_media() -> None:
    """Another proxy has salted them already."""
    body = chat(PICTURE % b',"uuid":"a"')
    assert BodySanitizer().passes(body, sent_by(trusted=True))


@pytest.mark.parametrize(
    "body",
    [
        chat(PICTURE % b',"uuid":"a"').decode().encode("utf-16"),
        b'{"messages":[{"content":[{"uuid":"a"}}]}',
        b'{"messages":[{"content":[{"image_url":"u",' + b'"uuid":"a",' * 1001 + b'"x":1}]}]}',
    ],
)
async def test_unreadable_bodies_that_may_hold_one_are_refused(body: bytes) -> None:
    """An engine may read what we cannot."""
    with pytest.raises(BodyUnchecked):
        await BodySanitizer().checked(body, sent_by(), [])


LONG = 'words of a turn before, {braced} and "quoted" ' * 400


def chat_after(message: str, **more: object) -> tuple[bytes, Exchange]:
    """Return a long chat as a client sends it, and its exchange as it is after the parse."""
    messages = [{"role": "user", "content": LONG}, {"role": "assistant", "content": LONG}]
    body = json.dumps({"model": "m", "messages": [*messages, "?"], **more}).replace('"?"', message).encode()
    exchange = sent_by()
    exchange.body = body
    exchange.inference = parse_body(RequestKind.CHAT, body)
    return body, exchange


@pytest.mark.parametrize(
    "message",
    [
        '{"role":"user","content":[{"type":"image_url","image_url":null,"uuid":"a"}]}',
        '{"content":[{"image_url":null,"\\u0075\\u0075\\u0069\\u0064":"a"}],"role":"user"}',
        '{"role":"user","content":[{"image_url":{"url":"u","mm_\\u0068ashes":"a"}}]}',
    ],
)
@pytest.mark.parametrize("more", [{}, {"tools": [{"type": "function", "function": {"name": "f"}}]}])
async def test_names_are_found_in_a_message_of_a_long_chat(message: str, more: dict[str, Any]) -> None:
    """Messages of text, with braces and quotes, do not hide it."""
    body, exchange = chat_after(message, **more)
    assert not BodySanitizer().passes(body, exchange)
    clean = await BodySanitizer().checked(body, exchange, [])
    document, sent = json.loads(clean), json.loads(body)
    assert '"a"' not in json.dumps(document["messages"][2])
    assert {**document, "messages": document["messages"][:2]} == {**sent, "messages": sent["messages"][:2]}


@pytest.mark.parametrize(
    "message",
    [
        '{"role":"user","content":"flat"}',
        '{"role":"user","content":[{"type":"text","text":"caf\\u00e9 \\"uuid\\": 1"}]}',
        '{"role":"user","content":"{\\"uuid\\": {}}"}',
    ],
)
async def test_a_long_chat_without_names_passes(message: str) -> None:
    """Whatever its texts quote."""
    assert BodySanitizer().passes(*chat_after(message))


@pytest.mark.parametrize(
    "more",
    [
        b'"messages":[{"content":[{"image_url":null,"uuid":"a"}]}]',
        b'"\\u006dessages":[{"content":[{"image_url":null,"uuid":"a"}]}]',
        b'"input":[{"content":[{"image_url":null,"uuid":"a"}]}]',
        b'"features":{"mm_hashes":{"image":["a"]}}',
    ],
)
@pytest.mark.parametrize("first", [True, False])
async def test_names_beside_the_messages_of_a_long_chat_are_found(more: bytes, first: bool) -> None:
    """In a second list of messages too, for an engine may read another one than we do."""
    body, exchange = chat_after('{"role":"user","content":"flat"}')
    exchange.body = body = b"{%b,%b" % (more, body[1:]) if first else b"%b,%b}" % (body[:-1], more)
    exchange.inference = parse_body(RequestKind.CHAT, body)
    assert not BodySanitizer().passes(body, exchange)
    clean = await BodySanitizer().checked(body, exchange, [])
    assert b'"uuid"' not in clean
    assert b"mm_hashes" not in clean


async def test_a_long_body_is_looked_at_by_the_members_of_its_scan() -> None:
    """Pictures make bodies long; the name is found behind megabytes of base64."""
    part = b'{"type":"image_url","image_url":{"url":"data:,%b"}%b}'
    filling = b"A" * MAX_DECODED_BYTES
    body, left = (chat(part % (filling, name)) for name in (b',"uuid":"a"', b""))
    exchange = sent_by()
    exchange.members = run_at_once(find_members(body, is_guarded))
    assert not BodySanitizer().passes(body, exchange)
    assert await BodySanitizer().checked(body, exchange, []) == left


async def test_a_body_without_such_names_passes_untouched() -> None:
    """As nearly all do."""
    body: dict[str, Any] = json.loads(chat(PICTURE % b""))
    assert BodySanitizer().passes(json.dumps(body).encode(), sent_by("alice"))
