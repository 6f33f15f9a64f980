"""Certificates rotated under https load: `python -m benchmarks.certificates [--rotations 100] [--clients 8]`.

One proxy serves https to clients that keep their connection and to clients that connect for each request. Each rotation
replaces the pair on disk: by turns both files one after the other, so that they do not fit for a moment, and the folder
that a symbolic link leads to, as Kubernetes does. The next rotation begins once a new connection is shown the new one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import ssl
import sys
import tempfile
import time
from collections import Counter
from functools import cache
from pathlib import Path

from kvproxy.proxy.listener.server import serve
from tests.support.certificates import Certificate, make_certificate
from tests.support.fake_engine import FakeEngine
from tests.support.ports import free_ports
from tests.support.process import kvproxy_serve

#: In which the new certificate is to be served.
WANTED_S = 10.0
_BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}]}).encode()
_REQUEST = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
_REQUEST += b"content-length: %d\r\n\r\n" % len(_BODY) + _BODY


@cache
def any_server() -> ssl.SSLContext:
    """Return a client's context that takes every certificate: which one is shown is measured, not trusted. One for all:
    it would take more CPU than the handshakes."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
    """Send one request; the status of the answer."""
    writer.write(_REQUEST)
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = next(line for line in head.split(b"\r\n") if line.startswith(b"content-length:"))
    await reader.readexactly(int(length.split(b":")[1]))
    return head.split()[1].decode()


async def client(port: int, results: Counter[str], over: asyncio.Event, *, keeps: bool) -> None:
    """Ask again and again, and count the answers and failures."""
    streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
    while not over.is_set():
        try:
            async with asyncio.timeout(30):
                if streams is None:
                    streams = await asyncio.open_connection("127.0.0.1", port, ssl=any_server())
                results[await ask(*streams)] += 1
        except (OSError, asyncio.IncompleteReadError, TimeoutError, StopIteration) as error:
            results[type(error).__name__] += 1
            keeps_now = False
        else:
            keeps_now = keeps
        if not keeps_now and streams is not None:
            streams[1].transport.abort()
            streams = None
        await asyncio.sleep(0.02)


async def shown(port: int) -> bytes:
    """Connect, and return the certificate as DER."""
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=any_server())
    certificate: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.transport.abort()
    return certificate


def replace(served: Path, made: Certificate, *, by_link: bool) -> None:
    """Put the pair in the place of the one that is served."""
    if by_link:
        new = served.with_name("next")
        new.symlink_to(made.certificate.parent)
        new.replace(served)
        return
    folder = served.resolve()
    os.replace(made.certificate, folder / "cert.pem")
    os.replace(made.private_key, folder / "key.pem")


async def run(rotations: int, clients: int) -> tuple[dict[str, Counter[str]], list[float]]:
    """Return the results of the clients by kind, and how long it took until each new certificate was served."""
    results = {"kept connections": Counter[str](), "a connection for each request": Counter[str]()}
    took_s: list[float] = []
    (port,) = free_ports(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        served = folder / "served"
        (folder / "0").mkdir()
        served.symlink_to(make_certificate(folder / "0", "127.0.0.1").certificate.parent)
        tls = f"{{certificate: {served}/cert.pem, private_key: {served}/key.pem}}"
        config = folder / "config.yaml"
        async with serve(FakeEngine("a")) as engine:
            config.write_text(
                f"listen: {{host: 127.0.0.1, port: {port}, tls: {tls}}}\n"
                f"admin: {{enabled: false}}\nendpoints: {{a: '{engine}'}}\n"
            )
            async with kvproxy_serve("--config", str(config)), asyncio.TaskGroup() as group:
                over = asyncio.Event()
                for kind, counts in results.items():
                    for _ in range(clients):
                        group.create_task(client(port, counts, over, keeps="kept" in kind))
                for number in range(1, rotations + 1):
                    (folder / str(number)).mkdir()
                    made = make_certificate(folder / str(number), "127.0.0.1")
                    wanted = ssl.PEM_cert_to_DER_cert(made.certificate.read_text())
                    began = time.monotonic()
                    replace(served, made, by_link=number % 2 == 0)
                    while await shown(port) != wanted:
                        await asyncio.sleep(0.05)
                        if time.monotonic() - began > 6 * WANTED_S:
                            break
                    took_s.append(time.monotonic() - began)
                over.set()
    return results, took_s


def report(results: dict[str, Counter[str]], took_s: list[float], clients: int) -> str:
    """Return the results as Markdown."""
    failed = sum(count for counts in results.values() for result, count in counts.items() if result != "200")
    late = sum(one > WANTED_S for one in took_s)
    took_s = sorted(took_s)
    lines = [
        "# Certificates",
        "",
        (__doc__ or "").split("\n\n", 1)[1].strip(),
        "",
        f"**{len(took_s)} rotations, {failed} failed requests, {late} served later than {WANTED_S:.0f} s.**",
        f"Until the new one was served: median {took_s[len(took_s) // 2]:.1f} s, longest {took_s[-1]:.1f} s.",
        "",
        "| clients | results |",
        "|---|---|",
    ]
    for kind, counts in results.items():
        found = ", ".join(f"{count} x {result}" for result, count in sorted(counts.items()))
        lines.append(f"| {clients} with {kind} | {found} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run and print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rotations", type=int, default=100)
    parser.add_argument("--clients", type=int, default=8, help="of each kind")
    options = parser.parse_args()
    sys.stdout.write(report(*asyncio.run(run(options.rotations, options.clients)), options.clients))


if __name__ == "__main__":
    main()
