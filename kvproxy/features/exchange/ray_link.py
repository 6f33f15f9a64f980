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
MAX_WAITING_BYTES = 16 * 1024 * 1024
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
        self._drop_gone()
        if len(self._listeners) >= MAX_LISTENERS:
            raise RuntimeError(f"{MAX_LISTENERS} replicas listen already")
        listener = self._listeners[name] = _Listener(topics)
        listener.asked_at = asyncio.get_running_loop().time()

    async def publish(self, messages: Sequence[tuple[str, bytes]]) -> None:
        """Give each to those who listen to its topic; of one that takes too slowly the oldest are dropped."""
        dropped = 0
        for topic, payload in messages:
            for listener in self._listeners.values():
                if topic in listener.topics:
                    dropped += listener.waiting.append(payload, len(payload) + MESSAGE_BYTES)
                    listener.came.set()
        if dropped:
            self._drop_gone()

    async def take(self, name: str) -> list[bytes]:
        """Return what waits for a listener, after HOLD_S at the latest.

        Raises: KeyError: of a listener that did not ask for a long time."""
        listener = self._listeners[name]
        listener.asked_at = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(HOLD_S):
                await listener.came.wait()
        except TimeoutError:
            self._drop_gone()
            return []
        listener.came.clear()
        return [listener.waiting.popleft() for _ in range(len(listener.waiting))]

    def _drop_gone(self) -> None:
        oldest = asyncio.get_running_loop().time() - GONE_S
        for name, listener in list(self._listeners.items()):
            if listener.asked_at < oldest:
                del self._listeners[name]


class RayLink(StoreLink):
    """Link over an actor of Ray. Its URL is the actor's name."""

    name = "ray"
    #: The first handle is kept while the actor answers: Ray ends one whose maker has dropped it, whoever else uses it.
    _actor: Any = None
    _node = ""  # of Ray, where this process found the actor

    async def __aexit__(self, *_: object) -> None:
        try:
            await super().__aexit__()
        finally:
            self._actor = None

    @property
    def where(self) -> str:
        return f"the actor {self._url} in Ray"

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Any]:
        from ray.exceptions import ActorDiedError, ActorUnschedulableError

        name = uuid.uuid4().hex  # a new one each time: a call that was given up may still take messages of the old
        try:
            async with asyncio.timeout(START_S):
                self._node = self._node or _find_node()
                if self._actor is None:
                    self._actor = await asyncio.to_thread(_find_actor, self._url)
                await self._in_ray().listen.remote(name, [self._topic, self._own])
        except (ActorDiedError, ActorUnschedulableError, TimeoutError):  # it is gone, or never came
            self._actor = None
            raise
        yield name

    async def _receive(self, connection: Any) -> None:
        while True:
            for payload in await self._in_ray().take.remote(connection):
                self._on_message(payload)

    async def _publish(self, connection: Any, messages: list[tuple[str, bytes]]) -> None:
        await self._in_ray().publish.remote(messages)

    def _in_ray(self) -> Any:
        """Return the actor; a call of one after its Ray has ended would start another Ray, or crash the process."""
        if _find_node() != self._node:
            raise ConnectionError("this process has left Ray")
        return self._actor


def _find_node() -> str:
    """Return the id of the node of Ray that this process is on."""
    import ray

    if not ray.is_initialized():
        raise ConnectionError("this process is not part of Ray")
    return str(ray.get_runtime_context().get_node_id())


def _find_actor(name: str) -> Any:
    """Return the handle of the actor, started if there is none."""
    import ray

    made = ray.remote(num_cpus=0, max_concurrency=2 * MAX_LISTENERS)(Switchboard)
    return made.options(name=name, namespace=NAMESPACE, get_if_exists=True).remote()
