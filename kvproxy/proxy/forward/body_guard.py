"""Changes to a request body.

Fields by which engines talk to each other are cut out of an untrusted client's, and its own names for media are cut out
or salted; a tenant's salt is put in, a model gets the name its engines use, and a client's own member is cut out where
the proxy sets that member itself. Every other byte stays as the client sent it.

With `kv_transfer_params` and its like a client can crash a decoder or have another user's KV cache read into its own
request: they are between proxies and engines."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import partial

import msgspec
from xxhash import xxh3_128_hexdigest

from kvproxy.base.json_scan import (
    MAX_DECODED_BYTES,
    Edit,
    Member,
    Members,
    NotAnObject,
    Span,
    Steps,
    Unreadable,
    apply_edits,
    cut_members,
    find_members,
    run_in_turns,
    scan_to_replace_model,
)
from kvproxy.base.json_scan import replace_model as replaced_model
from kvproxy.base.types import Headers
from kvproxy.proxy.forward.media_names import (
    MEDIA_ROOTS,
    Rename,
    find_media_names,
    may_messages_name_media,
    may_name_media,
)
from kvproxy.proxy.forward.request_body import START_BYTES
from kvproxy.proxy.request.body import BodyUnchecked
from kvproxy.proxy.request.exchange import Exchange, TopNames
from kvproxy.proxy.request.repeats import CHATS

#: Fields no client may set: copies of KV (vLLM) or encoder caches, the data-parallel rank, and keys of cached media
#: (SGLang).
CONTROL_FIELDS = frozenset(
    {
        "kv_transfer_params",
        "ec_transfer_params",
        "routed_dp_rank",
        "data_parallel_rank",
        "disagg_prefill_dp_rank",
        "mm_hashes",
        "mm_content_hashes",
        "content_hash",
    }
)
#: Prefixes of further ones: SGLang's meeting point of prefill and decode, and sources of KV.
CONTROL_PREFIXES = ("bootstrap_", "remote_")

#: Members that some versions of engines reject: kept by a scan for the features that use them.
EXAMINED_FIELDS = frozenset(
    {
        *("chat_template", "chat_template_kwargs", "echo", "logprobs", "n", "prompt", "prompt_embeds"),
        *("guided_choice", "guided_grammar", "guided_json", "guided_json_object", "guided_regex", "structural_tag"),
        *("prompt_logprobs", "response_format", "sampling_params", "structured_outputs", "text", "tools"),
        *("kv_transfer_params", "vllm_xargs"),
        "priority",
    }
)

#: vLLM copies the members of this one to where `kv_transfer_params` go.
_CARRIER = "vllm_xargs"
_SALT = "cache_salt"

_SUSPICIOUS = (b"_transfer_params", b'"bootstrap_', b'"remote_', b"_rank", b"vllm_xargs", b"_hash", b'uuid"', b"\\u00")
_NAMED = CONTROL_FIELDS | {_CARRIER}

#: Beyond this size and this many colons a strict parse of the names could take long.
_LARGE_BYTES = 256 * 1024
_MANY_COLONS = 20_000
_RECODED_BYTES = 1024 * 1024
_SLICE_BYTES = 512 * 1024
#: In a longer body the names are searched for outside its messages.
_SHORTENED_BYTES = 3 * 1024
_PROMPT_NAMES = (b'"messages":', b'"prompt":', b'"input":')
_SEPARATORS = (b",", b", ")
_MAX_NUMBER_BYTES = 32
_MAX_SALT_BYTES = 64 * 1024  # a longer one is replaced by its digest
_BOM = b"\xef\xbb\xbf"
_NOT_UTF8 = "JSON is UTF-8 (RFC 8259), and in another encoding it cannot be checked"
_LONGEST_NEEDLE = max(map(len, _SUSPICIOUS))

#: Beginnings of a body that may hold a JSON object, in UTF-16 and UTF-32 too. A form begins with its boundary's `--`.
_MAY_BE_OBJECT = re.compile(rb"[ \t\r\n\0\xef\xbb\xbf\xfe\xff]*+(?:\{|\Z)")

_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class Unchecked(Exception):
    """The body may hold such a field, or needs a salt, and cannot be read; the text is for the client."""


class BodySanitizer:
    """Bodies of clients that are not trusted hold nothing that is between proxies and engines."""

    def __init__(self) -> None:
        self._pace = asyncio.Lock()

    def looks_at(self, start: bytes, exchange: Exchange, headers: Headers) -> bool:
        """Return True if all of a body with this beginning is needed. A form with files is no JSON: such uploads
        stream."""
        wanted = exchange.isolated or not exchange.trusted or exchange.addition is not None
        return wanted and not _is_form(start, headers)

    def passes(self, body: bytes, exchange: Exchange) -> bool:
        """Return True if an engine may get the body unchanged, as nearly always."""
        if exchange.isolated:
            return False
        own = None if exchange.addition is None else exchange.addition.member
        if exchange.trusted and not own:
            return True
        known = exchange.members
        if known is None:
            read = exchange.names
            names = read.names if read is not None and read.body is body else read_names(body, exchange)
            if names is None or own in names:
                return False
            return exchange.trusted or (_are_clients(names) and not _names_media(body, exchange))
        if exchange.trusted:
            return _lacks(body, own, known)
        return needs_no_change(body, known, also=own) and not may_name_media(body)

    async def checked(self, body: bytes, exchange: Exchange, headers: Headers) -> bytes:
        """Return the body as an engine may get it. Raises BodyUnchecked."""
        known = exchange.members
        if self.passes(body, exchange):
            return body
        if exchange.body is None and _is_form(body, headers):
            return body
        if exchange.isolated and (salted := _salted_at_once(body, exchange)) is not None:
            return salted
        encoded = _is_encoded(headers)
        try:
            clean = body
            if not exchange.trusted:
                clean = await without_control_fields(body, encoded=encoded, known=known, pace=self._pace)
                known = known if clean is body else None
                clean = await without_media_names(clean, tenant=exchange.tenant, known=known, pace=self._pace)
            if exchange.isolated:
                own = exchange.inference.cache_salt if exchange.inference is not None else None
                known = known if clean is body else None
                tenant = exchange.tenant
                clean = await with_salt(clean, tenant=tenant, own=own, encoded=encoded, known=known, pace=self._pace)
            if exchange.addition is not None:
                known = exchange.members if clean is body else None
                name = exchange.addition.member
                clean = await self._without_own(clean, exchange, name, encoded=encoded, known=known)
        except Unchecked as error:
            raise BodyUnchecked(f"The request body is refused: {error}.", encoded=encoded) from None
        return clean

    async def _without_own(
        self, body: bytes, exchange: Exchange, name: str, *, encoded: bool, known: Members | None
    ) -> bytes:
        """Return the body without the member that the proxy sets; the exchange keeps a trusted client's."""
        if _lacks(body, name, known) or (encoded and exchange.trusted):
            return body
        if encoded:
            raise Unchecked(f"with a content-encoding it cannot be checked for a {name}, send it plain")
        if known is None:
            text = _in_utf8(body)
            if not await _occurs((b'"%b"' % name.encode(), b"\\u00"), text):
                return body
            if text is not body:
                return _not_an_object(body, text)
        try:
            members = known
            if members is None:
                members = await run_in_turns(find_members(body, name.__eq__), self._pace)
        except NotAnObject:
            return body
        except Unreadable as error:
            raise Unchecked(f"{error}, which cannot be checked for a {name}") from None
        found = [member for member in members.found if member.name == name]
        if not found:
            return body
        if exchange.trusted:
            exchange.own_number = _integer(body, found[-1])
        return await run_in_turns(apply_edits(body, cut_members(found)), self._pace)


def tenant_salt(tenant: str, own: str | None) -> str:
    """Return the salt of a tenant's prompts, its own salt (if it has one) included: equal for equal ones, in every
    proxy."""
    digest = hashlib.blake2b(b"%d:" % len(tenant), digest_size=16, person=b"kvproxy-tenant")
    digest.update((tenant + (own or "")).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def is_control(name: str) -> bool:
    """Return True if a top-level member of this name is between proxies and engines."""
    return name in CONTROL_FIELDS or name.startswith(CONTROL_PREFIXES)


def is_guarded(name: str) -> bool:
    """Return True if the guard needs a top-level member of this name."""
    return name in (_CARRIER, _SALT) or name in MEDIA_ROOTS or is_control(name)


def is_examined(name: str) -> bool:
    """Return True if the guard or a feature needs this member."""
    return is_guarded(name) or name in EXAMINED_FIELDS


def without_messages(body: bytes, messages: Sequence[bytes]) -> bytes:
    """Return a body, parsed as strict JSON, with the same names at its top and without its messages, so that a long one
    is parsed in a tenth of the time. The body itself if they are not found as clients commonly write them.

    Only whole values in an array or the whole value of a member are cut out and replaced: the second quote of the
    searched text ends a name (a text would go on behind it, and a quote within one has a backslash before it), so a
    value begins right behind it. No other member is lost with it."""
    if not messages:
        return body
    for name in _PROMPT_NAMES:
        if (at := body.find(name)) < 0:
            continue
        at += len(name)
        at += body.startswith(b" ", at)
        if body.startswith(b"[", at):
            at += 1
        elif len(messages) > 1:
            continue
        spaced = body.startswith(b" ", at + len(messages[0]) + 1)
        values = _SEPARATORS[spaced].join(messages)
        if values and body.startswith(values, at):
            return body[:at] + b"0" + body[at + len(values) :]
    return body


def needs_no_change(body: bytes, known: Members | None = None, *, also: str | None = None) -> bool:
    """Return True if the body surely holds no such field, nor a member named `also`: by the guarded members that are
    `known` from a scan, or by one strict parse of the names alone. False: it must be looked at."""
    if known is not None:
        named = (_CARRIER, also)
        return not any(is_control(member.name) or member.name in named for member in known.found)
    names = top_names(body)
    return names is not None and also not in names and _are_clients(names)


def _are_clients(names: Mapping[str, object]) -> bool:
    """None of them is between proxies and engines."""
    if not _NAMED.isdisjoint(names):
        return False
    for name in names:  # noqa: SIM110 - a generator would cost more, and every request runs this
        if name.startswith(CONTROL_PREFIXES):
            return False
    return True


def beside_messages(body: bytes, exchange: Exchange) -> bytes:
    """Return the body, or as much of a long one as has its names."""
    repeats = exchange.repeats
    if repeats is not None and body is exchange.body and repeats.rest is not body:
        return repeats.rest
    inference = exchange.inference
    if exchange.members is None and inference is not None and body is exchange.body and len(body) > _SHORTENED_BYTES:
        return without_messages(body, inference.prompt.parts)
    return body


def read_names(body: bytes, exchange: Exchange) -> Mapping[str, msgspec.Raw] | None:
    """Return the members of its body, read once; of a long one beside its messages. None as for `top_names`."""
    read = exchange.names
    if read is None or read.body is not body:
        beside = body if len(body) <= _SHORTENED_BYTES else beside_messages(body, exchange)
        exchange.names = read = TopNames(body, beside, top_names(beside))
    return read.names


def _names_media(body: bytes, exchange: Exchange) -> bool:
    """Return whether a body whose names were read may name media; messages of a long chat are searched one by one, and
    those that came before not once more."""
    read = exchange.names
    inference = exchange.inference
    repeats = exchange.repeats if body is exchange.body else None
    if repeats is not None and repeats.fresh is not body:
        found = may_name_media(repeats.fresh)
    elif read is None or read.beside is body or inference is None or inference.kind not in CHATS:
        found = may_name_media(body)
    else:
        found = may_name_media(read.beside) or may_messages_name_media(inference.prompt.parts)
    if not found and repeats is not None:
        repeats.note_harmless()
    return found


def _salted_at_once(body: bytes, exchange: Exchange) -> bytes | None:
    """Return what `checked` makes of nearly all bodies of isolated tenants; None if there is more to it than a salt."""
    names = None if exchange.members is not None else read_names(body, exchange)
    if names is None or _SALT in names:
        return None
    if exchange.addition is not None and exchange.addition.member in names:
        return None
    if not exchange.trusted and (not _are_clients(names) or _names_media(body, exchange)):
        return None
    return _with_salt_in_front(body, exchange.tenant, None, last=not names)


def _lacks(body: bytes, name: str | None, known: Members | None) -> bool:
    if known is not None:
        return not any(member.name == name for member in known.found)
    names = top_names(body)
    return names is not None and name not in names


def _integer(body: bytes, member: Member) -> int:
    """As engines read it, a text or `5.0` included. Raises Unchecked."""
    span = member.value
    try:
        value = json.loads(body[span.start : min(span.end, span.start + _MAX_NUMBER_BYTES)])
        if isinstance(value, bool) or int(value) != float(value):
            raise ValueError
        return int(value)
    except (ValueError, TypeError, OverflowError):
        raise Unchecked(f"`{member.name}` is no integer") from None


def top_names(body: bytes) -> dict[str, msgspec.Raw] | None:
    """Return the members of an object, the last of each name. None: not within milliseconds, or not in strict JSON."""
    if len(body) > MAX_DECODED_BYTES or (len(body) > _LARGE_BYTES and body.count(b":") > _MANY_COLONS):
        return None
    try:
        return _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


async def without_control_fields(
    body: bytes, *, pace: asyncio.Lock, encoded: bool = False, known: Members | None = None
) -> bytes:
    """Return the body without them, wherever a lenient parser would find them. Raises Unchecked.

    `encoded`: the client declared a content coding; then only what is plain JSON all the same can be checked. `known`:
    the guarded members, if a scan has found them.
    """
    if not body or needs_no_change(body, known):
        return body
    if encoded:
        raise Unchecked("with a content-encoding it cannot be checked, send it plain")
    if known is None:
        text = _in_utf8(body)
        if not await _occurs(_SUSPICIOUS, text):
            return body
        if text is not body:
            return _not_an_object(body, text)
    try:
        return await run_in_turns(_cut_out(body, known), pace)
    except NotAnObject:
        return body
    except Unreadable as error:
        raise Unchecked(f"{error}, which cannot be checked for engines' control fields") from None


def _cut_out(body: bytes, known: Members | None) -> Steps[bytes]:
    if known is None:
        known = yield from find_members(body, is_guarded)
    edits = cut_members(member for member in known.found if is_control(member.name))
    for member in known.found:
        if member.name == _CARRIER and body[member.value.start : member.value.start + 1] == b"{":
            carried = yield from find_members(body, is_control, inside=member.value)
            edits += cut_members(carried.found)
    return (yield from apply_edits(body, sorted(edits))) if edits else body


async def without_media_names(body: bytes, *, tenant: str, pace: asyncio.Lock, known: Members | None = None) -> bytes:
    """Return the body without a client's own names for media; a `uuid` of a tenant's is salted instead. Raises
    Unchecked.

    An untrusted body that `without_control_fields` has passed: what cannot be read there holds none of their letters.
    """
    if not may_name_media(body):
        return body
    rename = partial(tenant_salt, tenant) if tenant else None
    try:
        return await run_in_turns(_without_media_names(body, known, rename), pace)
    except NotAnObject:
        return body
    except Unreadable as error:
        raise Unchecked(f"{error}, which cannot be checked for names of media") from None


def _without_media_names(body: bytes, known: Members | None, rename: Rename | None) -> Steps[bytes]:
    if known is None:
        known = yield from find_members(body, MEDIA_ROOTS.__contains__)
    edits = yield from find_media_names(body, known.found, rename)
    return (yield from apply_edits(body, edits)) if edits else body


async def with_salt(
    body: bytes,
    *,
    tenant: str,
    pace: asyncio.Lock,
    own: str | None = None,
    encoded: bool = False,
    known: Members | None = None,
) -> bytes:
    """Return the body, a JSON object, with the tenant's salt in place of the client's own. Raises Unchecked.

    `own` is the client's salt if known already. A body that is no JSON object stays: no engine makes a prompt of it."""
    names = top_names(body) if known is None else None
    if names is not None and _SALT not in names:
        return _with_salt_in_front(body, tenant, own, last=not names)
    if encoded and names is None and body:
        raise Unchecked("with a content-encoding it cannot be salted, send it plain")
    if known is None and (text := _in_utf8(body)) is not body:
        return _not_an_object(body, text)
    try:
        if known is None:
            known = await run_in_turns(find_members(body, is_guarded), pace)
    except NotAnObject:
        return body
    except Unreadable as error:
        raise Unchecked(f"{error}, which cannot be salted") from None
    salts = [member for member in known.found if member.name == _SALT]
    own = _text(body, salts[-1].value) if own is None and salts else own
    at = known.opening + 1
    member = _salt_member(tenant, own, last=known.total == len(salts))
    return await run_in_turns(apply_edits(body, [Edit(at, at, member), *cut_members(salts)]), pace)


def _with_salt_in_front(body: bytes, tenant: str, own: str | None, *, last: bool) -> bytes:
    at = body.index(b"{") + 1
    return b"".join((body[:at], _salt_member(tenant, own, last=last), body[at:]))


def _salt_member(tenant: str, own: str | None, *, last: bool) -> bytes:
    return b'"cache_salt":"%s"%s' % (tenant_salt(tenant, own).encode(), b"" if last else b",")


def _text(body: bytes, span: Span) -> str | None:
    """Return a salt as text, whatever its type; null is none."""
    if span.end - span.start > _MAX_SALT_BYTES:
        return xxh3_128_hexdigest(memoryview(body)[span.start : span.end])
    value = body[span.start : span.end]
    try:
        salt = json.loads(value)
    except (ValueError, RecursionError):
        return value.decode("latin-1")
    return None if salt is None else salt if isinstance(salt, str) else value.decode("latin-1")


def _in_utf8(body: bytes) -> bytes:
    """Return the body itself, or what Python's parsers make of one in UTF-16 or UTF-32. Raises Unchecked."""
    encoding = json.detect_encoding(body)
    if encoding.startswith("utf-8"):
        return body
    if len(body) > _RECODED_BYTES:
        raise Unchecked(_NOT_UTF8)
    try:
        return body.decode(encoding, "surrogatepass").encode("utf-8", "surrogatepass")
    except UnicodeError:
        return b""  # an engine cannot read it either


def _not_an_object(body: bytes, text: bytes) -> bytes:
    """Return the body, whose text was in another encoding. Raises Unchecked for an object."""
    if text.removeprefix(_BOM).lstrip(b" \t\r\n").startswith(b"{"):
        raise Unchecked(_NOT_UTF8)
    return body


async def _occurs(letters: Sequence[bytes], body: bytes) -> bool:
    """Return True if the letters of such a name occur anywhere, also in an escaped spelling; in slices, so that other
    tasks run."""
    for at in range(0, len(body), _SLICE_BYTES):
        piece = body[at : at + _SLICE_BYTES + _LONGEST_NEEDLE]
        if any(needle in piece for needle in letters):
            return True
        await asyncio.sleep(0)
    return False


def _is_encoded(headers: Headers) -> bool:
    return any(
        name == b"content-encoding" and value.strip().lower() not in (b"", b"identity") for name, value in headers
    )


def _is_form(body: bytes, headers: Headers) -> bool:
    """Return True for a form, by its first bytes too: engines that read JSON despite the header would find unchecked
    fields."""
    if _MAY_BE_OBJECT.match(body[:START_BYTES]):
        return False
    return any(
        name == b"content-type" and value.strip().lower().startswith(b"multipart/form-data") for name, value in headers
    )


async def with_model(body: bytes, model: str, *, named: str, pace: asyncio.Lock) -> bytes:
    """`body` (a JSON object) with its top-level `model`, which is `named`, replaced; scanned in steps if it is long.

    A body that is not a JSON object is returned as it is: the engine's own error is what the client should see.
    """
    replaced = replaced_model(body, model, named=named)
    if replaced is not None:
        return replaced
    try:
        return await run_in_turns(scan_to_replace_model(body, model), pace)
    except Unreadable:
        return body
