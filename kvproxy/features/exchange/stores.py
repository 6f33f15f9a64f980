"""Where replicas of several machines meet: Redis or Valkey pub/sub, or NATS core. A connection that is lost is made
again, after a while that is different for each; meanwhile nothing waits for it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

from pydantic import SecretStr
from xxhash import xxh3_64_hexdigest

from kvproxy.base.background_task import BackgroundTask, cancel_tasks, raise_if_cancelled
from kvproxy.features.exchange.bounded_queue import BoundedQueue
from kvproxy.features.exchange.datagrams import MESSAGE_BYTES
from kvproxy.features.exchange.wire import Origin

log = logging.getLogger("kvproxy.sync")

#: Bytes waiting for the store.
MAX_WAITING_BYTES = 16 * 1024 * 1024
#: A store that takes no message for this long is away.
TIMEOUT_S = 3.0
#: Pause before it is tried again, doubling between these; any part of it by chance, so that replicas come one by one.
FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 5.0
#: Time for the last messages at the end, and messages sent at once.
LAST_WORD_S = 0.5
_TOGETHER = 128
#: Checks without a message, one per heartbeat at most, after which the link counts as broken: one's own come back
#: otherwise.
UNHEARD = 10
LOOK_S = 0.5
#: Bound on a value read from the store; a longer one is not ours.
MAX_RECALLED_BYTES = 4 * 1024 * 1024
#: A longer reply, or message, ends the connection.
MAX_REPLY_BYTES = MAX_RECALLED_BYTES + 64 * 1024
#: A message of one's own to oneself.
_PROOF = b"kvproxy"


class StoreLink(BackgroundTask):
    """As of Link. `on_change` is called when the store is reached and when it is away."""

    task_name = "sync store"
    name: str

    def __init__(
        self,
        url: SecretStr,
        topic: str,
        origin: Origin,
        *,
        on_message: Callable[[bytes], None],
        on_change: Callable[[bool], None],
        beat_s: float,
        rng: random.Random,
    ) -> None:
        self.connected = False
        self._reached = False  # by the present connection
        self.dropped = 0
        self._failed = False  # so far
        self._url = url.get_secret_value()
        self._topic = topic
        self._own = _place(topic, origin)
        self._pass_on = on_message
        self._on_change = on_change
        self._look_s = max(beat_s, LOOK_S)
        self._unheard = 0  # checks since the last message
        self._rng = rng
        self._waiting: BoundedQueue[tuple[str, bytes]] = BoundedQueue(MAX_WAITING_BYTES)
        self._news = asyncio.Event()
        self._sent = asyncio.Event()
        self._came_back = asyncio.Event()

    async def __aexit__(self, *_: object) -> None:
        if self.connected and self._waiting:  # the last message: the end of this life
            self._sent.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._sent.wait(), LAST_WORD_S)
        await super().__aexit__()

    @property
    def held_bytes(self) -> int:
        return self._waiting.held_bytes

    @property
    def where(self) -> str:
        """Address, without credentials."""
        parts = urlsplit(self._url)
        return f"{parts.scheme}://{parts.hostname or ''}{f':{parts.port}' if parts.port else ''}"

    def send(self, payload: bytes, to: Origin | None) -> None:
        if not self.connected:
            self.dropped += 1
            return
        where = self._topic if to is None else _place(self._topic, to)
        self.dropped += self._waiting.append((where, payload), len(payload) + MESSAGE_BYTES)
        self._news.set()

    async def _run(self) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                async with self._connection() as connection:
                    raise_if_cancelled()  # the library may have taken it for an error of its own
                    await _until_one_ends(self._receive(connection), self._speak(connection))
            except Exception as error:  # noqa: BLE001 - any error of a library: the store is away
                self._away(error)
            raise_if_cancelled()
            pause_s = FIRST_PAUSE_S if self._reached else min(LONGEST_PAUSE_S, 2 * pause_s)
            self._reached = False
            await asyncio.sleep(pause_s * self._rng.random())

    async def _speak(self, connection: Any) -> None:
        await self._prove(connection)
        self.connected = self._reached = True
        log.info("%s is reached", self.where)
        self._on_change(True)
        await _until_one_ends(self._transmit(connection), self._watch())

    def _away(self, error: Exception) -> None:
        while isinstance(error, ExceptionGroup):  # of subscriptions side by side
            error = error.exceptions[0]
        if self.connected or not self._failed:
            self._failed = True
            log.warning("%s is away (%s): each replica goes on alone", self.where, type(error).__name__)
        self._waiting.clear()
        if self.connected:
            self.connected = False
            self._on_change(False)

    async def _prove(self, connection: Any) -> None:
        """Prove that a store that takes subscriptions also delivers messages: one's own must come back first."""
        self._came_back.clear()
        async with asyncio.timeout(TIMEOUT_S):
            await self._publish(connection, [(self._own, _PROOF)])
            await self._came_back.wait()

    def _on_message(self, payload: bytes) -> None:
        self._unheard = 0
        if payload == _PROOF:
            self._came_back.set()
        else:
            self._pass_on(payload)

    async def _watch(self) -> None:
        self._unheard = 0
        # counted, and not timed: messages that came while the loop stood still are read first
        while self._unheard < UNHEARD:
            await asyncio.sleep(self._look_s)
            self._unheard += 1
        raise ConnectionError("published messages do not come back")

    async def _transmit(self, connection: Any) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            while self._waiting:
                taken = [self._waiting.popleft() for _ in range(min(_TOGETHER, len(self._waiting)))]
                async with asyncio.timeout(TIMEOUT_S):
                    await self._publish(connection, taken)
                raise_if_cancelled()
            self._sent.set()

    @abstractmethod
    def _connection(self) -> AbstractAsyncContextManager[Any]: ...

    @abstractmethod
    async def _receive(self, connection: Any) -> None: ...

    @abstractmethod
    async def _publish(self, connection: Any, messages: list[tuple[str, bytes]]) -> None: ...


def _place(topic: str, origin: Origin) -> str:
    return f"{topic}.to.{xxh3_64_hexdigest(f'{origin} {origin.epoch}'.encode())}"


async def _until_one_ends(*works: Coroutine[Any, Any, None]) -> None:
    """As a task group, which on Python 3.11 leaves the task that waits for it cancelled when one fails."""
    tasks = [asyncio.create_task(work, name="sync store") for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        await cancel_tasks(tasks)


class RedisLink(StoreLink):
    """Link over Redis or Valkey."""

    name = "redis"
    client: Any = None  # of the library, while the store is reached

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Any]:
        from redis.asyncio import Redis

        from kvproxy.features.exchange.bounded_redis import make_bounded_parser

        parser = make_bounded_parser(MAX_REPLY_BYTES)
        client = Redis.from_url(self._url, socket_connect_timeout=TIMEOUT_S, parser_class=parser)
        try:
            subscribed = client.pubsub()
            async with asyncio.timeout(TIMEOUT_S):
                await subscribed.subscribe(self._topic, self._own)
                for _ in range(2):  # one answer a channel: from then on it is in force
                    await subscribed.get_message(timeout=TIMEOUT_S)
            self.client = client
            yield subscribed
        finally:
            self.client = None
            with contextlib.suppress(Exception):  # a lost connection need not be closed
                async with asyncio.timeout(TIMEOUT_S):
                    await subscribed.aclose()  # type: ignore[no-untyped-call]
                    await client.aclose()

    async def _receive(self, connection: Any) -> None:
        async for message in connection.listen():
            if message["type"] == "message":
                self._on_message(message["data"])
            raise_if_cancelled()

    async def _publish(self, connection: Any, messages: list[tuple[str, bytes]]) -> None:
        pipeline = self.client.pipeline(transaction=False)
        for channel, payload in messages:
            pipeline.publish(channel, payload)
        await pipeline.execute()

    async def keep(self, payload: bytes, ttl_s: float) -> None:
        """Keep this for proxies that start when none is left to ask."""
        async with asyncio.timeout(TIMEOUT_S):
            await self.client.set(f"{self._topic}.kept", payload, px=int(1000 * ttl_s))

    async def recall(self, ttl_s: float) -> tuple[bytes, float]:
        """Return what is kept for so long, and how long it has been; b"" for nothing."""
        from redis.exceptions import ResponseError

        pipeline = self.client.pipeline()
        key = f"{self._topic}.kept"
        pipeline.getrange(key, 0, MAX_RECALLED_BYTES).pttl(key)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                payload, left_ms = await pipeline.execute()
        except ResponseError:  # of another type: it is written anew
            return b"", 0.0
        return payload or b"", max(0.0, ttl_s - left_ms / 1000)


class NatsLink(StoreLink):
    """NATS core."""

    name = "nats"

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Any]:
        from nats.aio.client import Client

        async def ignore(_: object = None) -> None: ...  # the library's own log: failures are handled here

        client = Client()
        try:
            await client.connect(
                self._url, allow_reconnect=False, connect_timeout=int(TIMEOUT_S), ping_interval=2, error_cb=ignore
            )
            subscribed = [await client.subscribe(subject) for subject in (self._topic, self._own)]
            await client.flush(timeout=int(TIMEOUT_S))
            yield client, subscribed
        finally:
            transport = getattr(client, "_transport", None)  # left open by a client that lost its server
            with contextlib.suppress(Exception):  # as above
                async with asyncio.timeout(TIMEOUT_S):
                    await client.close()
            if transport is not None:
                transport.close()

    async def _receive(self, connection: Any) -> None:
        _, subscribed = connection
        async with asyncio.TaskGroup() as each:
            for one in subscribed:
                each.create_task(self._listen(one), name="sync subscription")

    async def _listen(self, subscribed: Any) -> None:
        async for message in subscribed.messages:
            self._on_message(message.data)
        raise ConnectionError("the subscription ended")

    async def _publish(self, connection: Any, messages: list[tuple[str, bytes]]) -> None:
        client, _ = connection
        for subject, payload in messages:
            await client.publish(subject, payload)
        await client.flush(timeout=int(TIMEOUT_S))
