"""The longest time one request body holds the event loop, in CPU seconds: `python -m benchmarks.body_steps`.

Each body goes through a whole proxy (`kvcache`, an alias route) to a stand-in engine in a process of its own. A task
that runs once in every turn of the loop reads the CPU time of the loop's thread: the largest difference between two
readings is the longest turn, I/O and everything that ran in it included.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator

import uvloop

from kvproxy.app import Proxy
from kvproxy.operate.config.load import load_config
from kvproxy.proxy.listener.server import Server
from tests.support.ports import free_port

MIB = 1024 * 1024
#: Longer than the longest body, which is the default of `limits.body`.
SIZE = 31 * MIB
CHAT, COMPLETION, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"

_HEAD = b'{"model":"alias","messages":['


def _filled(head: bytes, piece: bytes, tail: bytes, size: int = SIZE) -> bytes:
    return head + piece * ((size - len(head) - len(tail)) // len(piece)) + tail


def _text(piece: bytes, size: int = SIZE) -> bytes:
    return _filled(_HEAD + b'{"role":"user","content":"', piece, b'"}]}', size)


#: Name, path and how the body is made.
BODIES: tuple[tuple[str, str, Callable[[], bytes]], ...] = (
    ("2 KB chat", CHAT, lambda: _text(b"Hello, world. ", 2048)),
    ("64 KB chat", CHAT, lambda: _text(b"Hello, world. ", 65536)),
    ("0.9 MiB text", CHAT, lambda: _text(b"Hello, world. ", 9 * MIB // 10)),
    ("0.9 MiB of different fields", CHAT, lambda: _different(9 * MIB // 10)),
    ("0.9 MiB of token ids", COMPLETION, lambda: _filled(b'{"model":"alias","prompt":[', b"1,", b"1]}", 9 * MIB // 10)),
    ("1.9 MiB text", CHAT, lambda: _text(b"Hello, world. ", 19 * MIB // 10)),
    ("1.9 MiB of numbers in messages", CHAT, lambda: _filled(_HEAD, b"1,", b"1]}", 19 * MIB // 10)),
    ("1.9 MiB of the field tools", CHAT, lambda: _filled(b"{", b'"tools":1,', b'"a":1}', 19 * MIB // 10)),
    ("1.9 MiB of different fields", CHAT, lambda: _different(19 * MIB // 10)),
    ("31 MiB text", CHAT, lambda: _text(b"Hello, world. ")),
    ("31 MiB text, escapes", CHAT, lambda: _text(b"\\u00e9")),
    ("31 MiB text, escaped quotes", CHAT, lambda: _text(b'say \\"hello world\\" ')),
    ("31 MiB text, backslashes", CHAT, lambda: _text(b"\\\\" * 50 + b"a ")),
    ("100 000 messages", CHAT, lambda: _HEAD + b'{"role":"user","content":"hello"},' * 100_000 + b"1]}"),
    ("1 000 000 numbers in messages", CHAT, lambda: _HEAD + b"1," * 1_000_000 + b"1]}"),
    ("31 MiB of numbers in messages", CHAT, lambda: _filled(_HEAD, b"1,", b"1]}")),
    ("31 MiB of empty objects", CHAT, lambda: _filled(_HEAD, b"{},", b"1]}")),
    ("31 MiB of brackets", CHAT, lambda: _HEAD + b"[" * (SIZE - 100)),
    ("31 MiB of the field model", CHAT, lambda: _filled(b"{", b'"model":"m",', b'"a":1}')),
    ("31 MiB of tools", CHAT, lambda: _filled(b'{"model":"alias","tools":["', b"t", b'"],"messages":[{}]}')),
    ("31 MiB model", CHAT, lambda: _filled(b'{"model":"', b"m", b'"}')),
    ("31 MiB cache_salt", CHAT, lambda: _filled(b'{"model":"alias","cache_salt":"', b"\\n", b'"}')),
    ("31 MiB number", CHAT, lambda: _filled(b'{"max_tokens":', b"9", b"}")),
    ("31 MiB of spaces", CHAT, lambda: _filled(b"{", b" ", b"}")),
    ("5 400 000 token ids", COMPLETION, lambda: _filled(b'{"model":"alias","prompt":[', b"12345,", b"1]}")),
    ("31 MiB of responses input", RESPONSES, lambda: _filled(b'{"model":"alias","input":[', b'"a",', b"1]}")),
    ("31 MiB UTF-16", CHAT, lambda: _text(b"Hello, world. ", SIZE // 2 - 2).decode().encode("utf-16")),
)


def _different(size: int) -> bytes:
    return b"{" + b",".join(b'"%x":1' % number for number in range(size // 9)) + b"}"


class Turns:
    """Reads the CPU time of this thread once in every turn of the loop."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    async def run(self) -> None:
        """Until cancelled."""
        last = time.thread_time()
        while True:
            await asyncio.sleep(0)
            now = time.thread_time()
            self.longest_s = max(self.longest_s, now - last)
            last = now


def post(port: int, path: str, body: bytes) -> bytes:
    """Send a body and return the head of the answer; runs in a thread, so that its work is not counted."""
    head = f"POST {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(head.encode() + body)
        return connection.makefile("rb").readline()


@contextlib.contextmanager
def engine() -> Iterator[str]:
    """Start an engine that reads requests and answers them shortly."""
    port = free_port()
    child = subprocess.Popen([sys.executable, "-m", "benchmarks.body_steps", "--engine", str(port)])
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        child.terminate()
        child.wait()


@contextlib.asynccontextmanager
async def proxy(engine_url: str, *, lmcache: bool) -> AsyncIterator[int]:
    """Its port."""
    kvcache = {"kv_events": False, **({"lmcache_endpoint": engine_url} if lmcache else {})}
    config = load_config(
        {
            "endpoints": {"e1": engine_url, "e2": engine_url},
            "filters": ["request_id", "inference_request", {"kvcache": kvcache}, "router"],
            "routes": [{"model": "alias", "cluster": "default", "upstream_model": "real"}, {"cluster": "default"}],
            "health": {"active": False},
        }
    )
    async with Proxy(config) as app, Server(app, drain_s=1.0) as server:
        yield int(server.url.rpartition(":")[2])


async def measure(rounds: int, *, lmcache: bool) -> None:
    """Print a line a body: the best of the rounds."""
    print(f"{'body':34} {'MiB':>6} {'longest turn':>13} {'all CPU':>10}  answer   memory")
    with engine() as url:
        await asyncio.to_thread(wait_for, url)
        async with proxy(url, lmcache=lmcache) as port:
            gc.collect()
            gc.freeze()  # as `kvproxy serve` does
            for name, path, make in BODIES:
                body = make()
                longest, total, answer = 1e9, 1e9, b""
                for _ in range(rounds):
                    turns = Turns()
                    watching = asyncio.create_task(turns.run())
                    began = time.thread_time()
                    answer = await asyncio.to_thread(post, port, path, body)
                    total = min(total, time.thread_time() - began)
                    await asyncio.sleep(0.3)  # what goes on behind the answer
                    watching.cancel()
                    longest = min(longest, turns.longest_s)
                peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
                shown = f"{longest * 1000:10.1f} ms {total * 1000:7.0f} ms"
                print(f"{name:34} {len(body) / MIB:6.2f} {shown}  {answer[9:12].decode()} {peak:7} MiB", flush=True)


def wait_for(url: str) -> None:
    """Wait until a listener is there."""
    for _ in range(100):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))):
            return
        time.sleep(0.1)


def serve_engine(port: int) -> None:
    """Serve an engine that counts the bytes of each body and answers."""

    def one(connection: socket.socket) -> None:
        usage = b'{"usage":{"prompt_tokens":10,"completion_tokens":2}}'
        tokens = b'{"tokens":[' + b"12345," * 250_000 + b'1],"max_model_len":1000000}'
        stats = b'{"total_key_count":1,"total_instance_count":0,"total_worker_count":0}'
        lookup = b'{"event_id":"","layout_info":{}}'
        rendered = tokens.replace(b"tokens", b"token_ids", 1)
        answers = {
            b"/v1/chat/completions/render": rendered,
            b"/tokenize": tokens,
            b"/lookup": lookup,
            b"/controller/key-stats": stats,
        }
        with connection, connection.makefile("rb") as stream:
            while line := stream.readline():
                length, answer = 0, answers.get(line.split()[1], usage)
                while (line := stream.readline()) not in (b"\r\n", b""):
                    if line.lower().startswith(b"content-length:"):
                        length = int(line[15:])
                stream.read(length)
                head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(answer)
                connection.sendall(head + answer)

    with socket.create_server(("127.0.0.1", port)) as listening:
        while True:
            threading.Thread(target=one, args=(listening.accept()[0],), daemon=True).start()


def main() -> None:
    """Run the engine, or the measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lmcache", action="store_true", help="with a lookup service and its tokens")
    parser.add_argument("--engine", type=int, metavar="PORT")
    options = parser.parse_args()
    if options.engine:
        serve_engine(options.engine)
    else:
        uvloop.run(measure(options.rounds, lmcache=options.lmcache))


if __name__ == "__main__":
    main()
