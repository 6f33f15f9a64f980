"""Request bodies of untrusted clients: fields by which engines talk to each other are cut out, and a tenant's salt is
put in. Every other byte stays as the client sent it.

With `kv_transfer_params` and its like a client can crash a decoder or have another user's KV cache read into its own
request: they are between proxies and engines.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable

import msgspec

from kvproxy.filters.json_members import Member, NotReadable, members, skip_space

#: Fields no client may set: transfers of KV (vLLM) or encoder caches, and which data-parallel rank serves.
CONTROL_FIELDS = frozenset(
    {
        "kv_transfer_params",
        "ec_transfer_params",
        "routed_dp_rank",
        "data_parallel_rank",
        "disagg_prefill_dp_rank",
    }
)
#: Beginnings of further ones: SGLang's meeting point of prefill and decode, and where KV is pulled from.
CONTROL_PREFIXES = ("bootstrap_", "remote_")

#: vLLM copies the members of this one into the same place `kv_transfer_params` goes to.
_CARRIER = "vllm_xargs"
_SALT = "cache_salt"

_SUSPICIOUS = (b"_transfer_params", b'"bootstrap_', b'"remote_', b"_rank", b"vllm_xargs", b"\\u00")
_NAMED = CONTROL_FIELDS | {_CARRIER}

#: Beyond this size and this many colons a strict parse of the names could take long.
_LARGE_BYTES = 1024 * 1024
_MANY_COLONS = 200_000
#: A body that must be looked at member by member is no longer than this.
MAX_WALKED_BYTES = 32 * 1024 * 1024
_SLICE_BYTES = 512 * 1024
_BOM = b"\xef\xbb\xbf"
_NOT_UTF8 = "JSON is UTF-8 (RFC 8259), and in another encoding it cannot be checked"
_LONGEST_NEEDLE = max(map(len, _SUSPICIOUS))

_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class Unchecked(Exception):
    """The body may hold such a field, or needs a salt, and cannot be read; the text is for the client."""


def tenant_salt(tenant: str, own: str | None) -> str:
    """The salt of a tenant's prompts, its own salt (if it has one) included: equal for equal ones, in every proxy."""
    digest = hashlib.blake2b(b"%d:" % len(tenant), digest_size=16, person=b"kvproxy-tenant")
    digest.update((tenant + (own or "")).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def is_control(name: str) -> bool:
    """Whether a top-level member of this name is between proxies and engines."""
    return name in CONTROL_FIELDS or name.startswith(CONTROL_PREFIXES)


def needs_no_change(body: bytes) -> bool:
    """Whether it surely holds no such field: one strict parse of the names alone. False: it must be looked at."""
    names = _names(body)
    return names is not None and _NAMED.isdisjoint(names) and not any(n.startswith(CONTROL_PREFIXES) for n in names)


def _names(body: bytes) -> dict[str, msgspec.Raw] | None:
    if len(body) > _LARGE_BYTES and body.count(b":") > _MANY_COLONS:
        return None
    try:
        return _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


async def without_control_fields(body: bytes, *, encoded: bool = False) -> bytes:
    """The body without them, wherever a lenient parser would find them. Raises Unchecked.

    `encoded`: the client declared a content coding; then only what is plain JSON all the same can be checked.
    """
    if not body or needs_no_change(body):
        return body
    if encoded:
        raise Unchecked("with a content-encoding it cannot be checked, send it plain")
    text = _in_utf8(body)
    start = _start_of_object(text)
    if start is None or not await _suspicious(text):
        return body
    if text is not body:
        raise Unchecked(_NOT_UTF8)
    return await _rewritten(body, start, is_control)


async def with_salt(body: bytes, *, tenant: str, own: str | None = None, encoded: bool = False) -> bytes:
    """The body, a JSON object, with the tenant's salt in place of the client's own. Raises Unchecked.

    `own` is the client's salt where it is known already. What is no JSON object stays: no engine makes a prompt of it.
    """
    names = _names(body)
    if names is None or _SALT in names:
        if encoded and names is None and body:
            raise Unchecked("with a content-encoding it cannot be salted, send it plain")
        text, found = _in_utf8(body), list[bytes]()
        if (start := _start_of_object(text)) is None:
            return body
        if text is not body:
            raise Unchecked(_NOT_UTF8)
        body = await _rewritten(body, start, lambda name: name == _SALT, found)
        own = _text(found[-1]) if own is None and found else own
    brace = body.index(b"{") + 1
    after = skip_space(body, brace)
    comma = b"" if body[after : after + 1] == b"}" else b","
    return b'%s"cache_salt":"%s"%s%s' % (body[:brace], tenant_salt(tenant, own).encode(), comma, body[brace:])


def _text(value: bytes) -> str | None:
    """A salt as text, whatever its type; null is none."""
    try:
        salt = json.loads(value)
    except ValueError:
        return value.decode("latin-1")
    return None if salt is None else salt if isinstance(salt, str) else value.decode("latin-1")


def _in_utf8(body: bytes) -> bytes:
    """The body itself, or what Python's parsers make of one in UTF-16 or UTF-32. Raises Unchecked."""
    encoding = json.detect_encoding(body)
    if encoding.startswith("utf-8"):
        return body
    if len(body) > _LARGE_BYTES:
        raise Unchecked(_NOT_UTF8)
    try:
        return body.decode(encoding, "surrogatepass").encode("utf-8", "surrogatepass")
    except UnicodeError:
        return b""  # nor can an engine read it


def _start_of_object(text: bytes) -> int | None:
    """Where the object begins; None when a JSON parser would find none there."""
    start = skip_space(text, len(_BOM) if text.startswith(_BOM) else 0)
    return start if text[start : start + 1] == b"{" else None


async def _suspicious(body: bytes) -> bool:
    """Whether the letters of such a name occur anywhere, also in an escaped spelling; in slices, so that others run."""
    for at in range(0, len(body), _SLICE_BYTES):
        piece = body[at : at + _SLICE_BYTES + _LONGEST_NEEDLE]
        if any(needle in piece for needle in _SUSPICIOUS):
            return True
        await asyncio.sleep(0)
    return False


async def _rewritten(body: bytes, start: int, drop: Callable[[str], bool], dropped: list[bytes] | None = None) -> bytes:
    """The body without the members that `drop` names; their values are added to `dropped`."""
    if len(body) > MAX_WALKED_BYTES:
        raise Unchecked(f"over {MAX_WALKED_BYTES} bytes it cannot be checked for engines' control fields")
    found: list[Member] = []
    try:
        for member in members(body, start):
            if member is None:
                await asyncio.sleep(0)
            else:
                found.append(member)
    except NotReadable as error:
        raise Unchecked(f"{error}, which cannot be checked for engines' control fields") from None
    if dropped is not None:
        dropped += [body[one.value : one.end] for one in found if drop(one.name)]
    pieces: list[bytes] = []
    end, separator = 0, False
    for one in found:
        if not pieces:
            pieces.append(body[: one.start])
        if not drop(one.name):
            if separator:
                pieces.append(body[end : one.start])
            separator = True
            pieces += [body[one.start : one.value], await _value(body[one.value : one.end], one.name, drop)]
        end = one.end
    return b"".join([*pieces, body[end:]])


async def _value(value: bytes, name: str, drop: Callable[[str], bool]) -> bytes:
    carries = name == _CARRIER and value.startswith(b"{") and drop is is_control
    return await _rewritten(value, 0, drop) if carries else value
