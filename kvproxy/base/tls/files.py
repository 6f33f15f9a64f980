"""Certificate files: loaded into contexts of OpenSSL, with errors that name the file, and the time they expire."""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from kvproxy.base.settings.paths import Finding, Path, error_at, missing_file
from kvproxy.base.timed_thread import read_file

#: PEM files are some kilobytes long; bundles of authorities a few hundred.
_MAX_BYTES = 4 * 1024 * 1024
_CERTIFICATE = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_PRIVATE_KEY = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----")
_SEQUENCE = 0x30
_UTC_TIME = 0x17
_VERSION = 0xA0


class UnusableFile(ValueError):
    """A certificate file that cannot be used. `field` names the setting of ServerTls or ClientTls with that file."""

    def __init__(self, field: str, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.field = field
        self.message = message
        self.hint = hint


class ServerTls(NamedTuple):
    """Files of a listener. `client_ca`: authorities of clients' certificates; empty: none is required."""

    certificate: str
    private_key: str
    client_ca: str = ""

    def make_context(self) -> ssl.SSLContext:
        """Return a context with what the files hold now. UnusableFile names the one at fault."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.sslobject_class = ListenerHandshake
        _load_pair(context, ("certificate", self.certificate), ("private_key", self.private_key))
        if self.client_ca:
            context.verify_mode = ssl.CERT_REQUIRED
            context.num_tickets = 0  # a resumed session would not be verified against the authorities of today
            context.options |= ssl.OP_NO_TICKET
            _load_authorities(context, "client_ca", self.client_ca)
        return context


class ClientTls(NamedTuple):
    """Files for connections to a server: authorities to verify it with, and a certificate to show it.

    Empty: the system's authorities, and no certificate.
    """

    ca_file: str = ""
    insecure: bool = False
    cert_file: str = ""
    key_file: str = ""

    def make_context(self) -> ssl.SSLContext:
        """Return a context that verifies certificate and host name unless `insecure`. UnusableFile names the file at
        fault."""
        context = _verifying_context(self.ca_file)
        if self.cert_file:
            key = ("key_file", self.key_file) if self.key_file else ("cert_file", self.cert_file)
            _load_pair(context, ("cert_file", self.cert_file), key)
        context.set_alpn_protocols(["http/1.1"])
        if self.insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context


TlsFiles = ServerTls | ClientTls


def find_files(tls: TlsFiles) -> Sequence[str]:
    """Return the paths it names."""
    return [one for one in tls if isinstance(one, str) and one]


def find_fault(tls: TlsFiles) -> UnusableFile | None:
    """Load the files as a connection would; return what is wrong with them."""
    try:
        tls.make_context()
    except UnusableFile as fault:
        return fault
    return None


def read_expiry(path: str) -> float | None:
    """Return when the first certificate of a chain expires, in seconds since 1970; None if the file shows none."""
    try:
        return min((_not_after(ssl.PEM_cert_to_DER_cert(pem)) for pem in _certificates(path)), default=None)
    except (OSError, ValueError, IndexError):
        return None


def _certificates(path: str) -> Iterator[str]:
    for found in _CERTIFICATE.findall(read_file(path, max_bytes=_MAX_BYTES)):
        yield found.decode("latin-1")


def _load_pair(context: ssl.SSLContext, certificate: tuple[str, str], private_key: tuple[str, str]) -> None:
    """Load certificate and key, each as (field, path). Never asks for a pass phrase, as OpenSSL would by itself."""
    field, path = certificate
    key_field, key_path = private_key
    if not _CERTIFICATE.search(_read(field, path)):
        raise UnusableFile(field, f"no PEM certificate in {path!r}", "are certificate and key swapped?")
    if not _PRIVATE_KEY.search(_read(key_field, key_path)):
        raise UnusableFile(key_field, f"no PEM private key in {key_path!r}", "are certificate and key swapped?")

    def refuse() -> str:
        hint = "write it without one (`openssl pkey -in KEY -out PLAIN_KEY`), readable for kvproxy alone"
        raise UnusableFile(key_field, f"the private key {key_path!r} is encrypted by a pass phrase", hint)

    try:
        context.load_cert_chain(path, key_path, password=refuse)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            what = f"the private key {key_path!r} does not belong to the certificate {path!r}"
            raise UnusableFile(key_field, what, "give the two files that were issued together") from error
        raise _blame(error, certificate, private_key) from error
    except OSError as error:
        raise UnusableFile(field, f"{path!r} or {key_path!r} cannot be read: {error.strerror}") from error


def _blame(error: ssl.SSLError, certificate: tuple[str, str], private_key: tuple[str, str]) -> UnusableFile:
    """Return the fault of a pair that OpenSSL refuses: the certificate's if it cannot be read by itself."""
    field, path = certificate
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=path)
    except ssl.SSLError:
        return UnusableFile(field, f"OpenSSL cannot read the certificate {path!r} ({error.reason})")
    field, path = private_key
    return UnusableFile(field, f"OpenSSL refuses the private key {path!r} ({error.reason or 'damaged'})")


def _verifying_context(ca_file: str) -> ssl.SSLContext:
    if not ca_file:
        return ssl.create_default_context()
    _read("ca_file", ca_file)
    try:
        return ssl.create_default_context(cafile=ca_file)
    except ssl.SSLError as error:
        raise _no_authorities("ca_file", ca_file, error) from error


def _load_authorities(context: ssl.SSLContext, field: str, path: str) -> None:
    _read(field, path)
    try:
        context.load_verify_locations(cafile=path)
    except ssl.SSLError as error:
        raise _no_authorities(field, path, error) from error


def _no_authorities(field: str, path: str, error: ssl.SSLError) -> UnusableFile:
    return UnusableFile(field, f"no usable PEM certificates in {path!r} ({error.reason or 'damaged'})")


def _read(field: str, path: str) -> bytes:
    try:
        return read_file(path, max_bytes=_MAX_BYTES)
    except OSError as error:
        raise UnusableFile(field, f"{path!r} cannot be read: {error.strerror}") from error


def _not_after(der: bytes) -> float:
    """Return the end of a certificate's validity, by its place in X.509: the ssl module shows that of a verified peer
    alone."""
    _, start, _ = _element(der, 0)  # Certificate
    _, at, _ = _element(der, start)  # its body
    tag, _, end = _element(der, at)
    fields = 3 if tag == _VERSION else 2  # version, if any, serial number, algorithm; then the issuer
    for _ in range(fields):
        at = end
        _, _, end = _element(der, at)
    tag, start, _ = _element(der, end)  # validity
    if tag != _SEQUENCE:
        raise ValueError("not a certificate")
    _, _, end = _element(der, start)  # not before
    tag, start, end = _element(der, end)
    text = der[start:end].decode("ascii")
    return (
        datetime.strptime(text, "%y%m%d%H%M%SZ" if tag == _UTC_TIME else "%Y%m%d%H%M%SZ")
        .replace(tzinfo=UTC)
        .timestamp()
    )


def _element(der: bytes, at: int) -> tuple[int, int, int]:
    """Return the tag of the DER element at `at`, where its value starts, and where it ends."""
    length = der[at + 1]
    start = at + 2
    if length & 0x80:
        count = length & 0x7F
        length = int.from_bytes(der[start : start + count], "big")
        start += count
    return der[at], start, start + length


_SENTENCE = b"This port serves https: plain http was sent to it. Use https:// in the URL.\n"
_PLAIN_HTTP = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s"
    % (len(_SENTENCE), _SENTENCE)
)


class ListenerHandshake(ssl.SSLObject):
    """Handshake of a listener, which answers a request of plain HTTP in plain HTTP."""

    outgoing: ssl.MemoryBIO
    refused = False

    def do_handshake(self) -> None:
        try:
            super().do_handshake()
        except ssl.SSLError as error:
            if error.reason != "HTTP_REQUEST" or self.refused:
                raise
            self.refused = True
            self.outgoing.write(_PLAIN_HTTP)
            raise ssl.SSLWantReadError from error  # event loops then send the contents of `outgoing`


def verify_server_tls(at: Path, tls: ServerTls) -> Iterator[Finding]:
    """Yield what is wrong with the files of a listener."""
    yield from _verify(at, tls, required=("certificate", "private_key"))


def verify_client_tls(at: Path, tls: ClientTls) -> Iterator[Finding]:
    """Yield what is wrong with the files for connections to engines."""
    if tls.key_file and not tls.cert_file:
        yield error_at((*at, "key_file"), "without a certificate it is not used", "set `cert_file`")
    else:
        yield from _verify(at, tls)


def _verify(at: Path, tls: TlsFiles, *, required: tuple[str, ...] = ()) -> Iterator[Finding]:
    files = {name: path for name, path in tls._asdict().items() if isinstance(path, str) and (path or name in required)}
    missing = [finding for name, path in files.items() for finding in missing_file((*at, name), path)]
    yield from missing
    if not files or missing:
        return
    if (fault := find_fault(tls)) is not None:
        yield error_at((*at, fault.field), fault.message, fault.hint)
