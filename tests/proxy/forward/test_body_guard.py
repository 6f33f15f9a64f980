"""Members that are cut out of a body or put in, and that every other byte stays."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvproxy.base.json_scan import MAX_DECODED_BYTES, Unreadable, find_members, run_at_once
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.cluster.feature import NumberedRequest
from kvproxy.cluster.pick import Pick
from kvproxy.proxy.forward import body_guard
from kvproxy.proxy.forward.body_guard import (
    BodySanitizer,
    Unchecked,
    is_examined,
    is_guarded,
    needs_no_change,
    tenant_salt,
    without_messages,
)
from kvproxy.proxy.request.body import BodyUnchecked
from kvproxy.proxy.request.exchange import Exchange


async def without_control_fields(body: bytes, *, encoded: bool = False) -> bytes:
    """Return the same from the members that a scan found on the way."""
    clean = await body_guard.without_control_fields(body, encoded=encoded, pace=asyncio.Lock())
    try:
        known = run_at_once(find_members(body, is_guarded))
    except Unreadable:
        return clean
    assert await body_guard.without_control_fields(body, pace=asyncio.Lock(), known=known) == clean
    return clean


async def with_salt(body: bytes, *, tenant: str, own: str | None = None, encoded: bool = False) -> bytes:
    """Return the same from the members that a scan found on the way."""
    salted = await body_guard.with_salt(body, tenant=tenant, own=own, encoded=encoded, pace=asyncio.Lock())
    try:
        known = run_at_once(find_members(body, is_guarded))
    except Unreadable:
        return salted
    assert await body_guard.with_salt(body, tenant=tenant, own=own, pace=asyncio.Lock(), known=known) == salted
    return salted


@pytest.mark.parametrize(
    ("body", "left"),
    [
        (b'{"kv_transfer_params":{"a":[1,"}"]},"model":"m"}', b'{"model":"m"}'),
        (b'{ "model" : "m" , "kv_transfer_params": null }', b'{ "model" : "m" }'),
        (b'{"kv_transfer_params":1,"a":2,"kv_transfer_params":{"x":2}}', b'{"a":2}'),
        (b'{"a":1.50e0,"kv_transfer_\\u0070arams":{},"b":"\\u00e9"}', b'{"a":1.50e0,"b":"\\u00e9"}'),
        (b'{"\\u006Bv_transfer_params":{}}', b"{}"),
        (b'{"ec_transfer_params":{},"x":1}', b'{"x":1}'),
        (b'{"bootstrap_host":"h","bootstrap_port":null,"bootstrap_room":[1,2],"x":1}', b'{"x":1}'),
        (b'{"x":1,"remote_engine_id":"e","remote_block_ids":[[1]],"y":2}', b'{"x":1,"y":2}'),
        (b'{"routed_dp_rank":1,"data_parallel_rank":0,"disagg_prefill_dp_rank":2}', b"{}"),
        (b'{"vllm_xargs":{"kv_transfer_params":"x","k":1},"m":0}', b'{"vllm_xargs":{"k":1},"m":0}'),
        (b'{"vllm_xargs":"kv_transfer_params"}', b'{"vllm_xargs":"kv_transfer_params"}'),
        (b'\xef\xbb\xbf{"x":NaN,"remote_x":1}', b'\xef\xbb\xbf{"x":NaN}'),
        (b'{"x":"\xff","remote_x":1}', b'{"x":"\xff"}'),
        (b'{"x":"\\ud800","\xc3\xa9":1,"remote_x":1}', b'{"x":"\\ud800","\xc3\xa9":1}'),
    ],
)
async def test_control_fields_are_cut_out_and_nothing_else(body: bytes, left: bytes) -> None:
    """In every spelling a parser takes, duplicates too; spacing, order and odd values stay."""
    assert await without_control_fields(body) == left


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b'{"model":"m","messages":[{"role":"user","content":"kv_transfer_params"}]}',
        b'{"tools":[{"kv_transfer_params":{},"remote_x":1}],"vllm_xargs":{"k":1}}',
        b'{"Kv_Transfer_Params":1,"remotely":2,"x_remote_":3}',
        b'[{"remote_x":1}]',
        b'"remote_x"',
        b"{not json",
        b"\xff\xfe",
        b'{"a":NaN}',
        '{"a":1}'.encode("utf-16"),
        '{"a":1}'.encode("utf-32-le"),
        b'{"a":' + b"[" * 100_000,
    ],
)
async def test_everything_else_stays_as_it_is(body: bytes) -> None:
    """Nested names, words in text, and what no engine reads as such a field."""
    assert await without_control_fields(body) == body


@pytest.mark.parametrize(
    "body",
    [
        b'{"remote_x":1',
        b'{"remote_x":1,}',
        '{"remote_x":1}'.encode("utf-16"),
        '{"kv_transfer_params":1}'.encode("utf-32-be"),
        b'{"remote_x":' + b"[" * 100_000,
        b'{"remote_x":[' + b"[]," * 600_000 + b"1]}",
    ],
)
async def test_unreadable_bodies_that_may_hold_one_are_refused(body: bytes) -> None:
    """An engine's parser may be more lenient than this one."""
    with pytest.raises(Unchecked):
        await without_control_fields(body)


async def test_a_coded_body_is_refused_unless_it_is_plain_after_all() -> None:
    """FastAPI does not look at content-encoding; something else on the way may."""
    plain = b'{"a":1}'
    assert await without_control_fields(plain, encoded=True) is plain
    with pytest.raises(Unchecked, match="content-encoding"):
        await without_control_fields(b"\x1f\x8b\x08", encoded=True)


async def test_a_body_of_very_many_values_is_searched_before_it_is_walked_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the letters of such a name it passes, however large."""
    monkeypatch.setattr(body_guard, "_LARGE_BYTES", 10)
    monkeypatch.setattr(body_guard, "_MANY_COLONS", 2)
    harmless, harmful = b'{"a":1,"b":2,"c":3}', b'{"a":1,"b":2,"remote_c":3}'
    assert not needs_no_change(harmless)
    assert await without_control_fields(harmless) is harmless
    assert await without_control_fields(harmful) == b'{"a":1,"b":2}'


async def test_a_long_body_is_not_decoded_for_its_names() -> None:
    """The scan that parsed it tells what there is to guard; a body that was not parsed is searched in slices."""
    filling = b'"a":"' + b"x" * MAX_DECODED_BYTES + b'"'
    harmless, harmful = b"{" + filling + b"}", b"{" + filling + b',"remote_x":1}'
    assert not needs_no_change(harmless)
    assert needs_no_change(harmless, run_at_once(find_members(harmless, is_guarded)))
    assert not needs_no_change(harmful, run_at_once(find_members(harmful, is_guarded)))
    assert await without_control_fields(harmless) is harmless
    assert await without_control_fields(harmful) == harmless
    assert await with_salt(harmful, tenant="alice") == b'{"cache_salt":"%s",%s' % (SALT, harmful[1:])


async def test_a_name_in_escapes_alone_is_cut_out() -> None:
    """However long its spelling is."""
    name = "".join(f"\\u{ord(letter):04x}" for letter in "kv_transfer_params").encode()
    assert await without_control_fields(b'{"a":1,"%s":{}}' % name) == b'{"a":1}'
    assert await without_control_fields(b'{"a":NaN,"%s":{}}' % name) == b'{"a":NaN}'


SALT = tenant_salt("alice", None).encode()


@pytest.mark.parametrize(
    ("body", "salted"),
    [
        (b"{}", b'{"cache_salt":"%s"}'),
        (b' { "a" : 1 }', b' {"cache_salt":"%s", "a" : 1 }'),
        (b'{"a":NaN}', b'{"cache_salt":"%s","a":NaN}'),
        (b'\xef\xbb\xbf{"a":1}', b'\xef\xbb\xbf{"cache_salt":"%s","a":1}'),
        (b'{"cache_salt":null,"a":1}', b'{"cache_salt":"%s","a":1}'),
    ],
)
async def test_a_tenants_salt_comes_in(body: bytes, salted: bytes) -> None:
    """In front of everything the client wrote."""
    assert await with_salt(body, tenant="alice") == salted % SALT


async def test_a_clients_own_salt_is_part_of_the_new_one() -> None:
    """Two salts of one tenant stay apart, and so do equal salts of two tenants; the last duplicate counts."""
    given = [b'{"cache_salt":"x"}', b'{"cache_salt":"y"}', b'{"cache_salt":"y","cache_s\\u0061lt":"x"}']
    salts = [json.loads(await with_salt(body, tenant=name))["cache_salt"] for name in "ab" for body in given]
    assert salts == [tenant_salt(name, own) for name in "ab" for own in "xyx"]
    assert len(set(salts)) == 4
    assert json.loads(await with_salt(given[0], tenant="a", own="digest"))["cache_salt"] == tenant_salt("a", "digest")


def test_tenants_cannot_choose_each_others_salt() -> None:
    """The bytes of the name and those of the salt are never in doubt."""
    assert len({tenant_salt("a", "b"), tenant_salt("ab", ""), tenant_salt("a\0b", ""), tenant_salt("a", "b\0")}) == 4


@pytest.mark.parametrize("body", [b"", b"[]", b"not json", b"\xff\xfe"])
async def test_bodies_other_than_objects_get_no_salt(body: bytes) -> None:
    """The engine refuses it anyway."""
    assert await with_salt(body, tenant="alice") is body


@pytest.mark.parametrize("body", [b'{"a":NaN', '{"a":1}'.encode("utf-16")])
async def test_a_body_without_room_for_a_salt_is_refused(body: bytes) -> None:
    """It would share the cache with every client."""
    with pytest.raises(Unchecked):
        await with_salt(body, tenant="alice")
    with pytest.raises(Unchecked, match="content-encoding"):
        await with_salt(b"\x1f\x8b", tenant="alice", encoded=True)


NAMES = (
    "messages",
    "prompt",
    "input",
    "model",
    "tools",
    "remote_x",
    "bootstrap_host",
    "kv_transfer_params",
    '"messages',
)
TEXTS = st.sampled_from(["", "hi", '"messages":[', '"messages": [1, 2]', '\\"prompt":', "kv_transfer_params", "\\"])
VALUES = st.recursive(
    TEXTS | st.integers(0, 20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
    max_leaves=8,
)
MESSAGES = st.lists(st.fixed_dictionaries({"role": st.just("user"), "content": VALUES}), min_size=1, max_size=3)


@given(
    before=st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=3),
    messages=MESSAGES | TEXTS,
    key=st.sampled_from(["messages", "prompt", "input"]),
    after=st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=3),
    compact=st.booleans(),
)
def test_a_body_without_its_messages_has_the_same_names(
    before: dict[str, Any], messages: Any, key: str, after: dict[str, Any], *, compact: bool
) -> None:
    """Whatever looks like its messages elsewhere, in texts, names and deeper members."""
    separators = (",", ":") if compact else (", ", ": ")
    members = [*before.items(), (key, messages), *after.items()]
    encoded = [f"{json.dumps(k)}{separators[1]}{json.dumps(v, separators=separators)}" for k, v in members]
    body = ("{" + separators[0].join(encoded) + "}").encode()
    listed = messages if isinstance(messages, list) else [messages]
    parts = [json.dumps(one, separators=separators).encode() for one in listed]
    left = without_messages(body, parts)
    assert set(json.loads(left)) == set(json.loads(body))
    assert needs_no_change(left) == needs_no_change(body)


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_long_messages_are_not_parsed_for_names(separators: tuple[str, str]) -> None:
    """As the usual clients write them."""
    messages = [{"role": "user", "content": "x" * 100}, {"role": "user", "content": "y"}]
    body = json.dumps({"model": "m", "messages": messages, "remote_x": 1}, separators=separators).encode()
    parts = [json.dumps(one, separators=separators).encode() for one in messages]
    assert len(without_messages(body, parts)) < 60
    assert not needs_no_change(without_messages(body, parts))


class Told:
    """A number that engines get in `priority`."""

    member = note = "priority"
    refusals: frozenset[int] = frozenset()

    def choose_number(self, pick: Pick, asked: NumberedRequest) -> int | None:
        raise NotImplementedError

    def is_named(self, error: bytes) -> bool:
        raise NotImplementedError

    def record_refusal(self, endpoint: Endpoint) -> None:
        raise NotImplementedError


def telling(*, trusted: bool = False) -> Exchange:
    """Return the exchange of a request to a cluster whose engines get a priority."""
    exchange = Exchange(received_at=0.0)
    exchange.trusted, exchange.addition = trusted, Told()
    return exchange


@pytest.mark.parametrize(
    ("body", "left"),
    [
        (b'{"model":"m"}', b'{"model":"m"}'),
        (b'{"model":"m","priority":3}', b'{"model":"m"}'),
        (b'{"priority":null , "model":"m","prior\\u0069ty":-1.5e3}', b'{"model":"m"}'),
        (b'{"a":NaN,"priority":1}', b'{"a":NaN}'),
        (b'{"messages":["priority"],"x":{"priority":1}}', b'{"messages":["priority"],"x":{"priority":1}}'),
        (b'{"x":"priority', b'{"x":"priority'),
        (b'["priority"]', b'["priority"]'),
        (b"", b""),
        (b"{not json", b"{not json"),
        ('{"a":1}'.encode("utf-16"), '{"a":1}'.encode("utf-16")),
    ],
)
async def test_a_priority_is_cut_out_where_engines_are_told_one(body: bytes, left: bytes) -> None:
    """In every spelling a parser takes, at the top alone; by the members of a scan too."""
    guard, exchange = BodySanitizer(), telling()
    assert await guard.checked(body, exchange, []) == left
    try:
        exchange.members = run_at_once(find_members(body, is_examined))
    except Unreadable:
        return
    assert await guard.checked(body, exchange, []) == left


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (b'{"a":"\\ud800\xff" "priority":1}', []),
        ('{"priority":1}'.encode("utf-16"), []),
        (b"\x1f\x8b", [(b"content-encoding", b"gzip")]),
    ],
)
async def test_unreadable_bodies_that_may_hold_a_priority_are_refused(
    body: bytes, headers: list[tuple[bytes, bytes]]
) -> None:
    """An engine may read what we cannot."""
    with pytest.raises(BodyUnchecked):
        await BodySanitizer().checked(body, telling(), headers)


@pytest.mark.parametrize(("value", "own"), [(b"-7", -7), (b'"12"', 12), (b"5.0", 5), (b"0", 0)])
async def test_a_trusted_clients_priority_is_noted_and_cut_out(value: bytes, own: int) -> None:
    """As engines read integers."""
    exchange = telling(trusted=True)
    body = b'{"model":"m","priority":%b}' % value
    assert not BodySanitizer().passes(body, exchange)
    assert await BodySanitizer().checked(body, exchange, []) == b'{"model":"m"}'
    assert exchange.own_number == own


@pytest.mark.parametrize("value", [b"1.5", b"null", b"true", b"[]", b'"high"', b"1e999", b"9" * 40])
async def test_a_trusted_clients_priority_that_is_no_integer_is_refused(value: bytes) -> None:
    """As an engine would refuse it; a number of 40 digits is nonsense."""
    with pytest.raises(BodyUnchecked, match="no integer"):
        await BodySanitizer().checked(b'{"priority":%b}' % value, telling(trusted=True), [])


async def test_a_trusted_clients_coded_body_passes() -> None:
    """It gets no number, since nothing is known of it."""
    body, headers = b"\x1f\x8b", [(b"content-encoding", b"gzip")]
    assert await BodySanitizer().checked(body, telling(trusted=True), headers) == body
