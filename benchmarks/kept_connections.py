"""Requests of others beside refused uploads, oversized heads and a rollout: `python -m benchmarks.kept_connections`.

The engine answers embeddings with a head of 67 KB, and uploads at once without reading them. The clients keep their
connections, never repeat a request, and count a failure when a connection ends without `connection: close` announced
before. In the rollout a second process listens on the same port (`listen.reuse_port`) before the first gets SIGTERM.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from kvproxy.proxy.listener.server import serve
from tests.support.ports import free_ports
from tests.support.process import KvproxyProcess, kvproxy_serve

UPLOAD = b"x" * 3_000_000
CHAT = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}]}).encode()
EMBED = json.dumps({"model": "m", "input": ["a"] * 600, "encoding_format": "bytes"}).encode()
LIMIT_S = 30.0
UPLOADS = 200
NEIGHBOURS = 16
EMBEDDINGS = 600
#: Clients of each language in the rollout.
ROLLOUT_CLIENTS = 67
#: Clients ask for so long before the second process is started, and after the first gets its signal.
SETTLE_S = 8.0
_NODE = """
const http = require('http');
const agent = new http.Agent({keepAlive: true});
const counts = {};
const fs = require('fs');
const body = BODY;
function ask() {
  return new Promise((done) => {
    const request = http.request({host: '127.0.0.1', port: PORT, path: '/v1/chat/completions', method: 'POST', agent,
      headers: {'content-type': 'application/json', 'content-length': body.length}}, (response) => {
      response.on('data', () => {}); response.on('end', () => done(String(response.statusCode)));
      response.on('error', (error) => done(error.code || 'error'));
    });
    request.on('error', (error) => done(error.code || 'error'));
    request.end(body);
  });
}
async function client() {
  while (!fs.existsSync('OVER')) {
    const result = await ask();
    counts[result] = (counts[result] || 0) + 1;
    await new Promise((done) => setTimeout(done, 50));
  }
}
Promise.all(Array.from({length: CLIENTS}, client)).then(() => { console.log(JSON.stringify(counts)); process.exit(); });
"""
_GO = """
package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"sync"
	"time"
)

func main() {
	transport := &http.Transport{MaxIdleConnsPerHost: CLIENTS}
	client := &http.Client{Transport: transport}
	counts := map[string]int{}
	var guard sync.Mutex
	var group sync.WaitGroup
	for i := 0; i < CLIENTS; i++ {
		group.Add(1)
		go func() {
			defer group.Done()
			for {
				if _, missing := os.Stat("OVER"); missing == nil {
					return
				}
				// A body without GetBody: the library cannot repeat the request by itself.
				body := io.MultiReader(bytes.NewReader([]byte(BODY)))
				request, _ := http.NewRequest("POST", "http://127.0.0.1:PORT/v1/chat/completions", body)
				request.ContentLength = int64(len(BODY))
				request.Header.Set("content-type", "application/json")
				result := ""
				response, err := client.Do(request)
				if err == nil {
					_, err = io.Copy(io.Discard, response.Body)
					response.Body.Close()
					result = fmt.Sprint(response.StatusCode)
				}
				if err != nil {
					parts := strings.Split(err.Error(), ": ")
					result = parts[len(parts)-1]
				}
				guard.Lock()
				counts[result]++
				guard.Unlock()
				time.Sleep(50 * time.Millisecond)
			}
		}()
	}
	group.Wait()
	text, _ := json.Marshal(counts)
	fmt.Println(string(text))
}
"""


async def engine(scope: Any, receive: Any, send: Any) -> None:
    """Answer as vLLM does: a head with all indexes, 404 before an upload is read, a small chat."""
    if scope["type"] != "http":
        return
    status, headers, body = 200, [(b"content-type", b"application/json")], b'{"object":"x"}'
    if scope["path"] == "/v1/embeddings":
        headers.append((b"metadata", b"i" * 67_000))
    elif scope["path"].startswith("/v1/audio"):
        status = 404
    if status == 200 and scope["method"] == "POST":
        while (await receive()).get("more_body"):
            pass
    await send({"type": "http.response.start", "status": status, "headers": [*headers, (b"content-length", b"14")]})
    await send({"type": "http.response.body", "body": body})


class Client:
    """One client that keeps its connection, and connects again only where the last answer announced the close."""

    def __init__(self, port: int, results: Counter[str]) -> None:
        self._port = port
        self._results = results
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, path: str, body: bytes, kind: str = "application/json") -> None:
        """Send one request and count its status, or how it failed."""
        try:
            if self._streams is None:
                self._streams = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 20)
            async with asyncio.timeout(LIMIT_S):
                result = await self._exchange(*self._streams, path, body, kind)
        except ConnectionRefusedError:
            result = "refused"
        except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
            result = f"failed: {type(error).__name__}"
            self.close()
        self._results[result] += 1

    async def _exchange(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str, body: bytes, kind: str
    ) -> str:
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        sending = asyncio.ensure_future(writer.drain())
        try:
            answer = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = next(line for line in answer.split(b"\r\n") if line.startswith(b"content-length:"))
            await reader.readexactly(int(length.split(b":")[1]))
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        if b"\r\nconnection: close" in answer:
            self.close()
        return answer.split()[1].decode()

    def close(self) -> None:
        """Leave the connection."""
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None


@asynccontextmanager
async def proxy(engine_url: str, port: int, *, more: str = "") -> AsyncIterator[KvproxyProcess]:
    """One kvproxy with the default settings."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        listen = f"listen: {{host: 127.0.0.1, port: {port}{more}}}\n"
        config.write_text(f"{listen}admin: {{enabled: false}}\nendpoints: {{a: '{engine_url}'}}\n")
        async with kvproxy_serve("--config", str(config)) as running:
            yield running


async def refusals(engine_url: str) -> dict[str, Counter[str]]:
    """Run uploads that are refused, each followed by a chat on its connection, and embeddings beside quiet clients."""
    (port,) = free_ports(1)
    found: dict[str, Counter[str]] = {name: Counter() for name in ("uploads", "behind them", "embeddings", "others")}
    async with proxy(engine_url, port):
        over = asyncio.Event()

        async def neighbour() -> None:
            client = Client(port, found["others"])
            while not over.is_set():
                await client.ask("/v1/chat/completions", CHAT)
            client.close()

        turns = asyncio.Semaphore(20)

        async def upload() -> None:
            async with turns:
                await upload_now()

        async def upload_now() -> None:
            client = Client(port, found["uploads"])
            await client.ask("/v1/audio/transcriptions", UPLOAD, "multipart/form-data; boundary=x")
            client._results = found["behind them"]  # the same connection, counted apart
            await client.ask("/v1/chat/completions", CHAT)
            client.close()

        async def embed() -> None:
            client = Client(port, found["embeddings"])
            for _ in range(EMBEDDINGS // 10):
                await client.ask("/v1/embeddings", EMBED)
            client.close()

        async with asyncio.TaskGroup() as group:
            quiet = [group.create_task(neighbour()) for _ in range(NEIGHBOURS)]
            await asyncio.gather(*(upload() for _ in range(UPLOADS)), *(embed() for _ in range(10)))
            over.set()
            await asyncio.gather(*quiet)
    return found


def programs(port: int, folder: Path) -> dict[str, tuple[str, ...]]:
    """Clients of other languages that this machine can run, by name. They end once there is a file `over`."""

    def filled(script: str) -> str:
        script = script.replace("OVER", str(folder / "over")).replace("BODY", json.dumps(CHAT.decode()))
        return script.replace("PORT", str(port)).replace("CLIENTS", str(ROLLOUT_CLIENTS))

    found: dict[str, tuple[str, ...]] = {}
    if shutil.which("node"):
        found["Node"] = ("node", "-e", filled(_NODE))
    if shutil.which("go"):
        source = folder / "clients.go"
        source.write_text(filled(_GO))
        subprocess.run(["go", "build", "-o", str(folder / "clients"), str(source)], check=True)
        found["Go"] = (str(folder / "clients"),)
    return found


async def rollout(engine_url: str) -> dict[str, Counter[str]]:
    """Replace the process under clients in Python, Node and Go: a new one on the same port, then SIGTERM."""
    (port,) = free_ports(1)
    found: dict[str, Counter[str]] = {"Python": Counter()}
    over = asyncio.Event()

    async def python() -> None:
        client = Client(port, found["Python"])
        while not over.is_set():
            await client.ask("/v1/chat/completions", CHAT)
            await asyncio.sleep(0.05)
        client.close()

    with tempfile.TemporaryDirectory() as folder:
        commands = programs(port, Path(folder))
        async with proxy(engine_url, port, more=", reuse_port: true") as old, asyncio.TaskGroup() as group:
            pipe = asyncio.subprocess.PIPE
            others = {
                name: await asyncio.create_subprocess_exec(*command, stdout=pipe) for name, command in commands.items()
            }
            for _ in range(ROLLOUT_CLIENTS):
                group.create_task(python())
            await asyncio.sleep(SETTLE_S)
            async with proxy(engine_url, port, more=", reuse_port: true"):
                old.terminate()
                await old.process.wait()
                await asyncio.sleep(SETTLE_S)
                over.set()
                (Path(folder) / "over").touch()
                for name, process in others.items():
                    output, _ = await process.communicate()
                    found[name] = Counter(json.loads(output))
    return found


async def main() -> None:
    async with serve(engine, drain_s=0.1, cut_grace_s=0.1) as url:
        refused = await refusals(url)
        sys.stdout.write(f"{refused}\n")
        rolled = await rollout(url)
    each = f"{ROLLOUT_CLIENTS} clients in each language"
    sections = {"Refused uploads and oversized heads": refused, f"A rollout under {each}": rolled}
    lines = ["# Kept connections", "", (__doc__ or "").split("\n\n", 1)[1].strip(), ""]
    for title, rows in sections.items():
        lines += [f"## {title}", "", "| requests | results |", "|---|---|"]
        lines += [
            f"| {name} | {', '.join(f'{n} x {r}' for r, n in sorted(counts.items()))} |"
            for name, counts in rows.items()
        ]
        lines.append("")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    asyncio.run(main())
