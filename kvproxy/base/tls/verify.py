"""Checks of certificate settings: files that are missing, and those that OpenSSL cannot use."""

from __future__ import annotations

from collections.abc import Iterator

from kvproxy.base.settings.paths import Finding, Path, error_at, missing_file
from kvproxy.base.tls.files import ClientTls, ServerTls, TlsFiles, find_fault


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
