"""Link between replicas in one Ray cluster: an actor that passes messages on. It lives as long as the replica that made
it; after that the next one that misses it makes another."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Any

from kvproxy.features.exchange.bounded_queue import BoundedQueue
from kvproxy.features.exchange.datagrams import MESSAGE_BYTES
from kvproxy.features.exchange.stores import StoreLink

NAMESPACE = "kvproxy"
#: Time for Ray to find or start the actor, a process of its own.
START_S = 60.0
#: A listener waits so long for messages in one call.
HOLD_S = 5.0
#: One that has not asked for this long is gone.
GONE_S = 30.0
#: Bytes that wait for one listener.
MAX_WAITING_BYTES = 4 * 1024 * 1024
MAX_LISTENERS = 1024


class _Listener:
    """A replica that takes messages, and those that wait for it."""

    def __init__(self, topics: Collection[str]) -> None:
        self.topics = frozenset(topics)
        self.waiting: BoundedQueue[bytes] = BoundedQueue(MAX_WAITING_BYTES)
        self.came = asyncio.Event()
        self.asked_at = 0.0


class Switchboard:
    """The actor. Its methods run in one event loop."""

    def __init__(self) -> None:
        self._listeners: dict[str, _Listener] = {}

    async def listen(self, name: str, topics: Collection[str]) -> None:
        """Keep what is published under these topics from now on for a listener of this name."""
        now = asyncio.get_running_loop().time()
        for other, listener in list(self._listeners.items()):
            if now - listener.asked_at > GONE_S:
                del self._listeners[other]
        if len(self._listeners) >= MAX_LISTENERS:
            raise RuntimeError(f"{MAX_LISTENERS} replicas listen already")
        listener = self._listeners[name] = _Listener(topics)
        listener.asked_at = now

    async def publish(self, messages: Sequence[tuple[str, bytes]]) -> None:
        """Give each to those who listen to its topic; of one that takes too slowly the oldest are dropped."""
        for topic, payload in messages:
            for listener in self._listeners.values():
                if topic in listener.topics:
                    listener.waiting.append(payload, len(payload) + MESSAGE_BYTES)
                    listener.came.set()

    async def take(self, name: str) -> list[bytes]:
        """Return what waits for a listener, after HOLD_S at the latest.

        Raises: KeyError: of a listener that did not ask for a long time."""
        listener = self._listeners[name]
        listener.asked_at = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(HOLD_S):
                await listener.came.wait()
        except TimeoutError:
            return []
        listener.came.clear()
        return [listener.waiting.popleft() for _ in range(len(listener.waiting))]


class RayLink(StoreLink):
    """Link over an actor of Ray. Its URL is the actor's name."""

    name = "ray"

    @property
    def where(self) -> str:
        return f"the actor {self._url} in Ray"

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Any]:
        name = uuid.uuid4().hex  # a new one each time: a call that was given up may still take messages of the old
        async with asyncio.timeout(START_S):
            actor = await asyncio.to_thread(_find_actor, self._url)
            await actor.listen.remote(name, [self._topic, self._own])
        yield actor, name

    async def _receive(self, connection: Any) -> None:
        actor, name = connection
        while True:
            for payload in await actor.take.remote(name):
                self._on_message(payload)

    async def _publish(self, connection: Any, messages: list[tuple[str, bytes]]) -> None:
        actor, _ = connection
        await actor.publish.remote(messages)


def _find_actor(name: str) -> Any:
    """Return the handle of the actor, started if there is none."""
    import ray

    made = ray.remote(num_cpus=0, max_concurrency=2 * MAX_LISTENERS)(Switchboard)
    return made.options(name=name, namespace=NAMESPACE, get_if_exists=True).remote()
