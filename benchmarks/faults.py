"""Faults of stores, sources of endpoints, files and local processes, planted under load: `python -m benchmarks.faults`.

Setups of `kvproxy serve` stand in front of engines that answer at once: two replicas on a real Redis and on a real
Valkey, discovery from a Kubernetes API, from a file and from a real etcd, and two workers. Servers that are not
installed are left out (`make test-services` installs them). Clients send chats all the time. Each fault lasts some
seconds. It is healed once replicas or workers are synced again, or discovery passes on an endpoint that came after the
end of the fault. Lost are requests without a 200 until then.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import redis.asyncio as redis

from benchmarks.ends import kubernetes_at, program
from kvproxy.features.exchange import wire
from kvproxy.features.exchange.wire import Origin
from kvproxy.proxy.listener.server import serve
from tests.services.install import found as installed
from tests.support.fake_engine import FakeEngine
from tests.support.fake_kubernetes import SLICES, FakeKubernetes, member, slice_of
from tests.support.ports import free_ports
from tests.support.process import kvproxy_serve

#: Faults last so long unless told otherwise, and setups run so long before the first one.
HOLD_S, WARM_UP_S = 5.0, 15.0
WANTED_S, WANTED_MB = 10.0, 20.0
_HEAL_S = 60.0
_CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


@dataclass
class Process:
    """One `kvproxy serve`, with its workers."""

    url: str
    admin: str
    pid: int
    start_s: float

    def rss_mb(self) -> float:
        root = psutil.Process(self.pid)
        return float(sum(one.memory_info().rss for one in (root, *root.children(recursive=True)))) / 1e6


Fault = Callable[[], AbstractAsyncContextManager[object]]


@dataclass
class Setup:
    """Processes under load, the faults to plant there, and whether all is well."""

    name: str
    processes: list[Process]
    healed: Callable[[], Awaitable[bool]]
    faults: dict[str, Fault]
    #: Calls once a fault is over: what is new then has to be noticed.
    news: Callable[[], Awaitable[None]] | None = None
    answers: Counter[str] = field(default_factory=Counter)

    def rss_mb(self) -> float:
        return sum(process.rss_mb() for process in self.processes)

    async def ask(self, process: Process) -> None:
        """Send chats for ever."""
        async with httpx.AsyncClient(base_url=process.url, timeout=30, verify=False) as client:
            while True:
                try:
                    answer = await client.post("/v1/chat/completions", json=_CHAT)
                    self.answers[str(answer.status_code)] += 1
                except httpx.TransportError as error:
                    self.answers[type(error).__name__] += 1
                await asyncio.sleep(0.05)


@dataclass
class Result:
    """Effects of one fault."""

    setup: str
    fault: str
    requests: int
    lost: str
    healed_s: float
    rss_mb: tuple[float, float]
    start_s: float

    @property
    def held(self) -> bool:
        return not self.lost and self.healed_s <= WANTED_S and self.rss_mb[1] - self.rss_mb[0] <= WANTED_MB


async def plant(setup: Setup, name: str, fault: Fault) -> Result:
    """Return what one fault did, once it is healed."""
    before, rss = setup.answers.copy(), setup.rss_mb()
    async with fault():
        await asyncio.sleep(HOLD_S)
    if setup.news is not None:
        await setup.news()
    ended = time.monotonic()
    while not await setup.healed() and time.monotonic() - ended < _HEAL_S:  # noqa: ASYNC110 - another program
        await asyncio.sleep(0.1)
    healed_s = time.monotonic() - ended
    found = setup.answers - before
    lost = ", ".join(f"{count} x {kind}" for kind, count in sorted(found.items()) if kind != "200")
    start_s = max(process.start_s for process in setup.processes)
    return Result(setup.name, name, found.total(), lost, healed_s, (rss, setup.rss_mb()), start_s)


@asynccontextmanager
async def proxy(folder: Path, name: str, config: dict[str, Any]) -> AsyncIterator[Process]:
    """One `kvproxy serve` of this configuration."""
    port, admin = free_ports(2)
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"listen": f"127.0.0.1:{port}", "admin": {"port": admin}, **config}))
    began = time.monotonic()
    async with kvproxy_serve("--config", str(path)) as running:
        yield Process(running.url, f"http://127.0.0.1:{admin}", running.process.pid, time.monotonic() - began)


async def get(process: Process, path: str) -> Any:
    """Return what the admin listener answers there; None for no answer."""
    with contextlib.suppress(httpx.TransportError, ValueError):
        async with httpx.AsyncClient(timeout=10, verify=False) as client:
            return (await client.get(process.admin + path)).json()
    return None


async def all_synced(processes: Sequence[Process]) -> bool:
    states = [await get(process, "/sync") for process in processes]
    return all(state is not None and state["status"] == "synced" for state in states)


# Replicas on a store


@asynccontextmanager
async def stores(folder: Path, engine: str, *, server: str = "redis-server") -> AsyncIterator[Setup]:
    """Two replicas, and faults of the store between them."""
    (port,) = free_ports(1)
    command = (str(installed(server)), "--save", "", "--dir", str(folder), "--port", str(port))
    async with AsyncExitStack() as stack:
        store = Restarted(stack, command)
        await store.start()
        client = await stack.enter_async_context(redis.Redis(port=port))
        replicas = []
        for name in ("one", "two"):
            sync = {"redis": f"redis://127.0.0.1:{port}", "replica": name}
            config = {"endpoints": {"a": engine}, "sync": sync}
            replicas.append(await stack.enter_async_context(proxy(folder, name, config)))
        topic, origin = await first_message(client)
        faults = {**StoreFaults(client, topic, origin).faults(), **store.faults()}
        yield Setup(server.partition("-")[0].capitalize(), replicas, lambda: all_synced(replicas), faults)


@asynccontextmanager
async def valkey(folder: Path, engine: str) -> AsyncIterator[Setup]:
    """Yield the same on a Valkey."""
    async with stores(folder, engine, server="valkey-server") as setup:
        yield setup


@dataclass
class Restarted:
    """A server that is halted, or killed and started again."""

    stack: AsyncExitStack
    command: Sequence[str]
    process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self.process = await self.stack.enter_async_context(program(*self.command))

    def faults(self) -> dict[str, Fault]:
        return {"the server halted (SIGSTOP)": self._halted, "the server killed and started again": self._killed}

    @asynccontextmanager
    async def _halted(self) -> AsyncIterator[None]:
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        yield
        self.process.send_signal(signal.SIGCONT)

    @asynccontextmanager
    async def _killed(self) -> AsyncIterator[None]:
        assert self.process is not None
        self.process.kill()
        yield
        await self.start()


async def first_message(client: redis.Redis) -> tuple[str, Origin]:
    """Return the topic, and who sent the first message there."""
    async with client.pubsub() as listening:
        await listening.psubscribe("*")
        async for message in listening.listen():
            if message["type"] == "pmessage" and b".to." not in message["channel"]:
                with contextlib.suppress(Exception):
                    return message["channel"].decode(), wire.decode(message["data"]).origin
    raise AssertionError("no message came")


@dataclass
class StoreFaults:
    """Faults of a store and of those who write to it."""

    client: redis.Redis
    topic: str
    origin: Origin

    def faults(self) -> dict[str, Fault]:
        later = Origin(self.origin.host, self.origin.worker, self.origin.epoch + 1)
        beat = wire.Heartbeat(self.origin, 1 << 60, 0.0, 0, joining=False, blocks=0, echoes=[])
        false = [
            wire.Batch(self.origin, 1 << 60, 0.0, [], []),
            beat,
            wire.PeerSnapshot(self.origin, 1 << 60, 0, 0, [], [], more=False),
            msgspec.structs.replace(beat, origin=later),
            wire.Bye(self.origin),
        ]
        names = msgspec.msgpack.encode(wire.Hello(self.origin))
        odd = names.replace(self.origin.host.encode(), b"\xff" * len(self.origin.host))
        strangers = [wire.Hello(Origin(f"stranger-{number}", 0, 1)) for number in range(1000)]
        return {
            "PUBLISH refused, SUBSCRIBE allowed": lambda: self._refused("-publish"),
            "connections cut every 0.2 s": lambda: self._repeated(self._cut, 0.2),
            "halted by CLIENT PAUSE": lambda: self._repeated(lambda: self.client.client_pause(3000), 10.0),
            "messages that are not UTF-8, 10 a second": lambda: self._published([odd], 0.1),
            "false batches, beats, snapshots and goodbyes": lambda: self._published(false, 0.05),
            "1,000 peers that say hello and fall silent": lambda: self._published(strangers, 0.005),
            "a message of 200 MB": lambda: self._published([b"x" * 200_000_000], 60.0),
            "`kept` and claims are lists": self._lists,
            "FLUSHALL every second": lambda: self._repeated(self.client.flushall, 1.0),
        }

    async def _cut(self) -> None:
        for kind in ("normal", "pubsub"):
            await self.client.client_kill_filter(_type=kind, skipme=True)

    @asynccontextmanager
    async def _refused(self, rule: str) -> AsyncIterator[None]:
        await self.client.execute_command("ACL", "SETUSER", "default", rule)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            await self.client.execute_command("ACL", "SETUSER", "default", "+@all")  # type: ignore[no-untyped-call]

    @asynccontextmanager
    async def _repeated(self, call: Callable[[], Awaitable[object]], pause_s: float) -> AsyncIterator[None]:
        over = asyncio.Event()  # and no cancellation, which redis-py swallows while it connects

        async def repeat() -> None:
            while not over.is_set():
                with contextlib.suppress(redis.RedisError):
                    await call()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(over.wait(), pause_s)

        task = asyncio.create_task(repeat())
        yield
        over.set()
        await task

    def _published(self, messages: Sequence[Any], pause_s: float) -> AbstractAsyncContextManager[None]:
        encoded = [one if isinstance(one, bytes) else msgspec.msgpack.encode(one) for one in messages]
        turn = iter(range(1 << 30))
        return self._repeated(lambda: self.client.publish(self.topic, encoded[next(turn) % len(encoded)]), pause_s)

    @asynccontextmanager
    async def _lists(self) -> AsyncIterator[None]:
        for key in (f"{self.topic}.kept", f"{self.topic}.claim.pin a 17"):
            await self.client.delete(key)
            await self.client.lpush(key, "x")
        yield


# Discovery


@dataclass
class Newcomers:
    """Engines that come after each fault; discovery has to pass them on."""

    stack: AsyncExitStack
    process: Process
    put: Callable[[str, str], Awaitable[None]]
    count: int = 0

    async def come(self) -> None:
        self.count += 1
        url = await self.stack.enter_async_context(serve(FakeEngine("n"), drain_s=0.1))
        await self.put(f"newcomer-{self.count}", url)

    async def noticed(self) -> bool:
        return f'"newcomer-{self.count}"' in json.dumps(await get(self.process, "/endpoints"))


@asynccontextmanager
async def kubernetes(folder: Path, engine: str) -> AsyncIterator[Setup]:
    """Discovery from a Kubernetes API that answers wrongly, and by odd objects."""
    api = FakeKubernetes()

    def put(name: str, url: str, address: str = "127.0.0.1", port: int = 0) -> None:
        ports = (("http", port or int(url.rpartition(":")[2])),)
        api.put(SLICES, slice_of(name, member(name, address), ports=ports))

    async def newcomer(name: str, url: str) -> None:
        put(name, url)

    @asynccontextmanager
    async def odd_objects() -> AsyncIterator[None]:
        odd = [("n" * 253, "127.0.0.1", 0), ("user", "user:pw@127.0.0.1", 0), ("colons", "::zz::", 0)]
        for name, address, port in [*odd, ("high", "127.0.0.1", 99999), ("low", "127.0.0.1", -1)]:
            put(name, engine, address, port)
        broken = slice_of("bad-name", member("bad name!", "127.0.0.1"))
        api.put(SLICES, broken)
        yield
        for name in ("n" * 253, "user", "colons", "high", "low", "bad-name"):
            api.delete(SLICES, name)

    @asynccontextmanager
    async def lists(raw: bytes) -> AsyncIterator[None]:
        api.raw_list = raw
        api.compact()
        api.say_gone()
        yield
        api.raw_list = None

    @asynccontextmanager
    async def refusing() -> AsyncIterator[None]:
        api.refuse = (500, "broken")
        api.drop(half=b'{"type": "ADDED", "obj')
        yield
        api.refuse = None

    @asynccontextmanager
    async def hanging() -> AsyncIterator[None]:
        api.hang = True
        api.drop()
        yield
        api.hang = False

    status = {"kind": "Status", "metadata": {}, "code": 200}
    endless = {"kind": "List", "metadata": {"resourceVersion": "1", "continue": "for ever"}, "items": []}
    faults: dict[str, Fault] = {
        "pods of odd names, addresses and ports": odd_objects,
        "a Status in place of a list": lambda: lists(json.dumps(status).encode()),
        "`items: null`": lambda: lists(b'{"kind": "List", "metadata": {"resourceVersion": "1"}, "items": null}'),
        "a list whose pages never end": lambda: lists(json.dumps(endless).encode()),
        "a list of 30 MB in one string": lambda: lists(b'{"kind": "' + b"x" * 30_000_000 + b'"}'),
        "500 and a watch cut in half a line": refusing,
        "no answer to anything": hanging,
    }
    put("engine", engine)
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(serve(api, drain_s=0.1))
        process = await stack.enter_async_context(proxy(folder, "kubernetes", kubernetes_at(url)))
        newcomers = Newcomers(stack, process, newcomer)
        yield Setup("Kubernetes", [process], newcomers.noticed, faults, newcomers.come)


@asynccontextmanager
async def file(folder: Path, engine: str) -> AsyncIterator[Setup]:
    """Discovery from a file that cannot be read, or holds what is no endpoint."""
    path = folder / "endpoints.json"
    good = {"engine": engine}

    def write(content: str) -> None:
        new = path.with_suffix(".new")
        new.write_text(content)
        new.replace(path)

    async def newcomer(name: str, url: str) -> None:
        good[name] = url
        write(json.dumps(good))

    @asynccontextmanager
    async def content(text: str) -> AsyncIterator[None]:
        write(text)
        yield

    @asynccontextmanager
    async def pipe() -> AsyncIterator[None]:
        path.unlink()
        os.mkfifo(path)
        yield
        path.unlink()

    write(json.dumps(good))
    async with AsyncExitStack() as stack:
        config = {"discovery": {"file": {"path": str(path)}}}
        process = await stack.enter_async_context(proxy(folder, "file", config))
        newcomers = Newcomers(stack, process, newcomer)
        many = {f"e{number}": f"http://10.0.{number >> 8}.{number & 255}" for number in range(20_000)}
        odd = {"self": process.url, "no": "not an ip", "secret": {"url": engine, "api_key": {"file": str(path)}}}
        faults: dict[str, Fault] = {
            "a pipe in place of the file": pipe,
            "half a file": lambda: content('{"engine": "http://127'),
            "the proxy itself, no address, a key from a file": lambda: content(json.dumps({**good, **odd})),
            "20,000 endpoints, JSON": lambda: content(json.dumps(many)),
            "20,000 endpoints, YAML": lambda: content("".join(f"{name}: {url}\n" for name, url in many.items())),
        }
        yield Setup("file", [process], newcomers.noticed, faults, newcomers.come)


@asynccontextmanager
async def etcd(folder: Path, engine: str) -> AsyncIterator[Setup]:
    """Discovery from a real etcd with odd keys, killed and started again."""
    port, peer = free_ports(2)
    url = f"http://127.0.0.1:{port}"
    peers = ("--listen-peer-urls", f"http://127.0.0.1:{peer}", "--data-dir", str(folder / "etcd"))
    command = ("etcd", *peers, "--listen-client-urls", url, "--advertise-client-urls", url)

    async def put(name: str, value: str) -> None:
        await asyncio.to_thread(_etcdctl, url, "put", f"/e/{name}", value)

    @asynccontextmanager
    async def odd_keys() -> AsyncIterator[None]:
        for number, value in enumerate(("{", "[]", '"ftp://x"', json.dumps({"url": "not an ip"}), "x" * 100_000)):
            await put(f"odd-{number}", value)
        await put("file", json.dumps({"url": engine, "api_key": {"file": "/etc/hostname"}}))
        yield
        await asyncio.to_thread(_etcdctl, url, "del", "/e/odd-", "/e/odd-~")
        await asyncio.to_thread(_etcdctl, url, "del", "/e/file", "")

    async with AsyncExitStack() as stack:
        server = Restarted(stack, command)
        await server.start()
        await put("engine", engine)
        config = {"discovery": {"etcd": {"urls": [url], "prefix": "/e/"}}}
        process = await stack.enter_async_context(proxy(folder, "etcd", config))
        newcomers = Newcomers(stack, process, put)
        faults = {"odd keys, one names a file": odd_keys, **server.faults()}
        yield Setup("etcd", [process], newcomers.noticed, faults, newcomers.come)


def _etcdctl(url: str, call: str, key: str, value: str) -> None:
    """Put or delete by etcd's JSON gateway."""
    encoded = {"key": _base64(key), ("value" if call == "put" else "range_end"): _base64(value)}
    path = "put" if call == "put" else "deleterange"
    httpx.post(f"{url}/v3/kv/{path}", json=encoded, timeout=10).raise_for_status()


def _base64(text: str) -> str:
    import base64

    return base64.b64encode(text.encode()).decode()


# Workers


@asynccontextmanager
async def workers(folder: Path, engine: str) -> AsyncIterator[Setup]:
    """Two workers whose sockets are removed and written to."""
    temporary = folder / "run"
    temporary.mkdir()
    with _temporary(temporary):
        async with proxy(folder, "workers", {"endpoints": {"a": engine}, "workers": 2}) as process:
            paths = {path.name: path for path in temporary.rglob("*") if path.is_socket()}
            senders = [wire.Hello(Origin("", number, 1)) for number in range(2576)]

            @asynccontextmanager
            async def removed(name: str) -> AsyncIterator[None]:
                paths[name].unlink()
                yield

            @asynccontextmanager
            async def folder_removed() -> AsyncIterator[None]:
                shutil.rmtree(paths["sync-0.sock"].parent)
                yield

            @asynccontextmanager
            async def claimed() -> AsyncIterator[None]:
                with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
                    for one in senders:
                        await asyncio.to_thread(out.sendto, msgspec.msgpack.encode(one), str(paths["sync-0.sock"]))
                yield

            async def healed() -> bool:
                async with httpx.AsyncClient(timeout=10, verify=False) as client:
                    with contextlib.suppress(httpx.TransportError):
                        reloaded = await client.post(f"{process.admin}/reload")
                        return reloaded.status_code == 200 and await all_synced([process])
                return False

            names = [name for name in sorted(paths) if name.startswith(("sync-0", "worker-1"))]
            faults: dict[str, Fault] = {f"{name} removed": partial(removed, name) for name in names}
            faults["the folder of the sockets removed"] = folder_removed
            faults = {"2,576 invented workers": claimed, **faults}
            yield Setup("workers", [process], healed, faults)


@contextmanager
def _temporary(folder: Path) -> Iterator[None]:
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = str(folder)
    try:
        yield
    finally:
        os.environ.pop("TMPDIR")
        if before is not None:
            os.environ["TMPDIR"] = before


SETUPS = (stores, valkey, kubernetes, file, etcd, workers)
#: Programs without which a setup is left out.
NEEDS = {stores: "redis-server", valkey: "valkey-server", etcd: "etcd"}


async def run(only: str) -> list[Result]:
    """All faults of each setup, one setup after the other."""
    found: list[Result] = []
    for setup in SETUPS:
        if only not in setup.__name__ or (setup in NEEDS and installed(NEEDS[setup]) is None):
            print(f"left out: {setup.__name__}", file=sys.stderr)
            continue
        with tempfile.TemporaryDirectory() as name:
            async with serve(FakeEngine("a"), drain_s=0.1) as engine, setup(Path(name), engine) as one:
                clients = [asyncio.create_task(one.ask(process)) for process in one.processes for _ in range(2)]
                await asyncio.sleep(WARM_UP_S)
                for fault, planted in one.faults.items():
                    found.append(await plant(one, fault, planted))
                    print(found[-1], file=sys.stderr, flush=True)
                for client in clients:
                    client.cancel()
                await asyncio.gather(*clients, return_exceptions=True)
    return found


def report(results: Sequence[Result]) -> str:
    """Return the results as Markdown."""
    held = sum(one.held for one in results)
    lines = [
        "# Faults",
        "",
        (__doc__ or "").split("\n\n", 1)[1].strip(),
        "",
        f"Command: `python -m benchmarks.faults`, load {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores.",
        "",
        f"**{held} of {len(results)}: no request lost, healed within {WANTED_S:.0f} s, memory within"
        f" {WANTED_MB:.0f} MB.**",
        "",
        "| setup | fault | requests | lost | healed after s | a start takes s | RSS MB before, behind |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {one.setup} | {one.fault} | {one.requests} | {one.lost or 0} | {one.healed_s:.1f} | {one.start_s:.1f}"
        f" | {one.rss_mb[0]:.0f}, {one.rss_mb[1]:.0f} |"
        for one in results
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run and print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="setups whose name holds this")
    options = parser.parse_args()
    sys.stdout.write(report(asyncio.run(run(options.only))))


if __name__ == "__main__":
    main()
