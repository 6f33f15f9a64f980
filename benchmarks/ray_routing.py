"""Request routers of Ray Serve over four simulated replicas: `kvproxy.ray` beside Ray's own.

    pip install 'kvproxy[ray]' ai-dynamo-runtime pyzmq time-machine
    python -m benchmarks.ray_routing [--rounds N] > benchmarks/reports/ray.md

Each router's code runs as it is, with Ray Serve's queues and retries around it, in virtual time; replicas are simulated
engines in the same process, so no Ray is started. PrefixCacheAffinityRouter has its tree here too, and KVAwareRouter
gets token ids, KV events over ZMQ, first tokens and ends as in Ray Serve LLM; the actor at which our ingresses meet is
5 ms away. Agents and chats are those of benchmarks/small_traces.py. Then each router chooses for one request after the
other: CPU of a choice.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import time
from array import array
from collections.abc import AsyncIterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

from benchmarks import virtual
from benchmarks.markdown import table
from benchmarks.small_traces import BLOCK_TOKENS, ENGINES, MODEL, TRACES, Ask, SmallTrace, play, summarize
from kvproxy.features.exchange import service, stores
from kvproxy.lab.simulator.engine import Engine
from kvproxy.lab.simulator.engine_io import KvEvent, SimRequest
from kvproxy.lab.simulator.engine_runner import EngineRunner
from kvproxy.lab.simulator.kv_event_publisher import EventEncoder, KvEventPublisher, PublisherSettings
from kvproxy.lab.simulator.tokenizer import Tokenizer, hash_blocks

OURS = "kvproxy.ray:KVCacheRouter"
ALONE = f"{OURS}, each alone"
DYNAMO = "KVAwareRouter"
ROUTERS = ("PowerOfTwoChoices", "ConsistentHash", "PrefixCacheAffinityRouter", DYNAMO, OURS)
#: Routers by the number of ingresses.
CASES = {1: ROUTERS, 2: (*ROUTERS, ALONE)}
#: Time of a message between ingresses of ours, through the actor.
_ACTOR_S = 0.005
CELLS = [(count, name) for count, names in CASES.items() for name in names]
_ROOM = 1000  # max_ongoing_requests: engines queue by themselves
_EVENTS_S = 0.003


class Replica:
    """Replica of Ray Serve as its routers see it, around a simulated engine."""

    def __init__(self, name: str, small: SmallTrace) -> None:
        from ray.serve._private.common import DeploymentID, ReplicaID

        self.replica_id = ReplicaID(name, DeploymentID("engine", "app"))
        self.node_id = self.availability_zone = "here"
        self.max_ongoing_requests = _ROOM
        self.multiplexed_model_ids: set[str] = set()
        self.routing_stats: dict[str, Any] = {}
        self.backend_http_endpoint = None
        self.ongoing = 0
        self.runner = EngineRunner(
            Engine(small.engine(kv_events=True)),
            clock=time.monotonic,
            on_events=self._publish,
            on_output=lambda *_: None,
        )
        self.publisher: KvEventPublisher | None = None

    async def get_queue_len(self, *, deadline_s: float) -> int:
        """As of Ray Serve."""
        return self.ongoing

    async def _publish(self, events: Sequence[KvEvent]) -> None:
        if self.publisher is not None:
            await self.publisher.publish(events)
            time.sleep(_EVENTS_S)  # noqa: ASYNC251 - real time, for those who follow in a thread


class Result:
    """Result of a replica, as its router sees it: a stream of two pieces."""

    def __init__(self) -> None:
        self.pieces: asyncio.Queue[str] = asyncio.Queue()

    async def __anext__(self) -> str:
        return await self.pieces.get()


class Local:
    """Actor whose methods run here."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self._target, name))


class HeldService:
    """Dynamo's selection service; virtual time stands still during its calls."""

    def __init__(self, service: Any) -> None:
        self._service = service

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._service, name)
        if name == "add_output_block":
            return method

        async def call(*given: Any) -> Any:
            clocks = virtual.CLOCK
            for clock in clocks:
                clock.outside += 1
            try:
                return await method(*given)
            finally:
                for clock in clocks:
                    clock.outside -= 1

        return call


class LocalActor(stores.StoreLink):
    """Actor at which ingresses meet, in this process and in virtual time; it takes as long as one elsewhere."""

    name = "ray"
    _subscribed: ClassVar[dict[str, list[asyncio.Queue[bytes]]]] = {}

    @contextlib.asynccontextmanager
    async def _connection(self) -> AsyncIterator[Any]:
        arriving: asyncio.Queue[bytes] = asyncio.Queue()
        for topic in (self._topic, self._own):
            self._subscribed.setdefault(topic, []).append(arriving)
        yield arriving

    async def _receive(self, connection: Any) -> None:
        while True:
            self._on_message(await connection.get())

    async def _publish(self, connection: Any, messages: list[tuple[str, bytes]]) -> None:
        loop = asyncio.get_running_loop()
        for topic, payload in messages:
            for arriving in self._subscribed.get(topic, ()):
                loop.call_later(_ACTOR_S, arriving.put_nowait, payload)


class Ingress:
    """One ingress replica: a router, and what Ray Serve does around it."""

    def __init__(self, router: Any, tracker: Any) -> None:
        self.router = router
        self.tracker = tracker

    async def choose(self, pending: Any) -> Any:
        """Return the replica for a request."""
        return await self.router._choose_replica_for_request(pending)

    def routed(self, pending: Any, replica: Replica, result: Result) -> None:
        """Report that a replica took it."""
        self.router.on_send_request(replica.replica_id)
        replica.ongoing += 1
        self.router.on_new_queue_len_info(replica.replica_id, replica.ongoing)
        self.router.on_request_routed(pending, replica.replica_id, result)

    def completed(self, pending: Any, replica: Replica) -> None:
        """Report its end."""
        replica.ongoing -= 1
        self.router.decrement_queue_len_cache(replica.replica_id)
        self.router.on_request_completed(replica.replica_id, pending.metadata.internal_request_id)


def make_pending(ask: Ask, token_ids: Sequence[int], number: int) -> Any:
    """Return a request as Ray Serve LLM gives it to routers."""
    from ray.serve._private.common import RequestMetadata
    from ray.serve._private.request_router.common import PendingRequest

    messages = [{"role": "user", "content": ask.prompt}]
    body = SimpleNamespace(model=MODEL, messages=messages, max_tokens=ask.output_tokens, stream=True)
    metadata = RequestMetadata(f"r{number}", f"i{number}", session_id=ask.session, is_streaming=True)
    return PendingRequest([body], {"tokens": list(token_ids)}, metadata)


def _router_class(name: str) -> tuple[Any, dict[str, Any]]:
    if name in (OURS, ALONE):
        from kvproxy import ray as ours

        if name == ALONE:
            return ours.KVCacheRouter, {"settings": {"sync": {}}}
        vars(service)["RayLink"] = LocalActor
        vars(ours)["_meet_in_ray"] = lambda _: {"ray": "here"}
        return ours.KVCacheRouter, {}
    if name == "PowerOfTwoChoices":
        from ray.serve._private.request_router import PowerOfTwoChoicesRequestRouter

        return PowerOfTwoChoicesRequestRouter, {}
    if name == "ConsistentHash":
        from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter

        return ConsistentHashRouter, {}
    if name == DYNAMO:
        from ray.llm._internal.serve.routing_policies.kv_aware.kv_aware_router import KVAwareRouter

        return KVAwareRouter, {}
    from ray.llm._internal.serve.routing_policies.prefix_aware import prefix_aware_router, prefix_tree

    prefix_aware_router.ray = SimpleNamespace(get=lambda value: value)
    return prefix_aware_router.PrefixCacheAffinityRouter, {"tree_actor": Local(prefix_tree.PrefixTree())}


async def _make_tracker(replicas: Sequence[Replica], number: int) -> Any:
    """Return the tracker of one ingress of Ray Serve LLM, which follows the replicas' events."""
    from ray.llm._internal.serve.routing_policies.kv_aware import kv_token_tracker

    class Tracker(kv_token_tracker.KVTokenTracker):  # type: ignore[misc]  # of a package without types here
        def _start_replica_tracking(self) -> None:
            """Have the replicas given."""

    tracker = Tracker(serve_deployment_id="engine", ingress_replica_rank=number)
    tracker._svc = HeldService(tracker._svc)
    for replica in replicas:
        name = replica.replica_id.unique_id
        tracker._register_block_size(BLOCK_TOKENS, name)
        await tracker._upsert_worker(kv_token_tracker.get_worker_id(name), name, _metadata(replica))
    kv_token_tracker.set_kv_token_tracker(tracker)
    return tracker


def _metadata(replica: Replica) -> dict[str, Any]:
    publisher = replica.publisher
    assert publisher is not None
    return {
        "endpoint": publisher.endpoint,
        "replay_endpoint": publisher.replay_endpoint,
        "block_size": BLOCK_TOKENS,
        "max_num_batched_tokens": replica.runner.engine.settings.max_batched_tokens,
        "dp_rank": 0,
    }


class Broadcast:
    """Gives reservations of one ingress to the others at once."""

    def __init__(self, others: Sequence[Any]) -> None:
        self._others = others

    def report(self, reservation: Any) -> None:
        """As of Ray Serve LLM."""
        for other in self._others:
            asyncio.get_running_loop().create_task(other.on_reservations_created([reservation]))


@contextlib.asynccontextmanager
async def set_up(name: str, small: SmallTrace, count: int) -> AsyncIterator[tuple[list[Replica], list[Ingress]]]:
    """Yield the replicas and the ingresses of one router."""
    from ray.serve._private.common import DeploymentHandleSource

    kind, kwargs = _router_class(name)
    replicas = [Replica(f"replica-{number}", small) for number in range(ENGINES)]
    async with contextlib.AsyncExitStack() as stack:
        for replica in replicas:
            if name == DYNAMO:
                encoder = EventEncoder(block_size=BLOCK_TOKENS)
                publisher = KvEventPublisher(PublisherSettings(topic=""), encoder=encoder, wall_clock=time.monotonic)
                replica.publisher = await stack.enter_async_context(publisher)
            await stack.enter_async_context(replica.runner)
        ingresses = []
        for number in range(count):
            tracker = await _make_tracker(replicas, number) if name == DYNAMO else None
            router = kind(
                deployment_id=replicas[0].replica_id.deployment_id,
                handle_source=DeploymentHandleSource.REPLICA,
                use_replica_queue_len_cache=True,
                get_curr_time_s=time.monotonic,
            )
            router.initialize_state(**kwargs)
            router.update_replicas(replicas)
            ingresses.append(Ingress(router, tracker))
        trackers = [each.tracker for each in ingresses if each.tracker is not None]
        for tracker in trackers:
            tracker._reservation_forwarder = Broadcast([each for each in trackers if each is not tracker])
        await asyncio.sleep(1)
        yield replicas, ingresses


async def play_router(trace: str, name: str, count: int) -> dict[str, float]:
    """Play the trace once."""
    small = TRACES[trace]
    tokenizer = Tokenizer()
    numbers = itertools.count()
    async with set_up(name, small, count) as (_, ingresses):

        async def send(ask: Ask) -> None:
            number = next(numbers)
            token_ids = tokenizer.encode(ask.prompt)
            await _serve(ingresses, ingresses[number % count], ask, token_ids, number)

        return summarize(await play(small.read(), send))


async def _serve(
    ingresses: Sequence[Ingress], ingress: Ingress, ask: Ask, token_ids: Sequence[int], number: int
) -> None:
    pending = make_pending(ask, token_ids, number)
    tokens = pending.kwargs.pop("tokens")
    if ingress.tracker is not None:
        pending.kwargs["request_token_ids"] = tokens
    replica = await ingress.choose(pending)
    result = Result()
    ingress.routed(pending, replica, result)
    output = array("q", [number]) * ask.output_tokens
    hashes = hash_blocks([*token_ids, *output], BLOCK_TOKENS)
    request = SimRequest(str(number), hashes, len(token_ids), ask.output_tokens, token_ids=[*token_ids, *output])
    trackers = [each.tracker for each in ingresses if each.tracker is not None]
    try:
        with replica.runner.run_requests([request]) as group:
            member = group.members[0]
            while member.first is None and not group.ended:
                await group.wait_for_change()
            if member.first is None:
                raise RuntimeError("the engine refused it")
            result.pieces.put_nowait("first")
            await result.__anext__()
            ask.first_token()
            for tracker in trackers:
                await tracker.on_lifecycle_events([("on_prefill_complete", (pending.metadata.request_id,))])
            while not group.ended:
                await group.wait_for_change()
            ask.prompt_tokens = len(token_ids)
            ask.cached_tokens = member.first.cached_tokens
    finally:
        ingress.completed(pending, replica)
        for tracker in trackers:
            await tracker.on_lifecycle_events([("on_request_completed", (pending.metadata.request_id,))])


async def measure_choice(trace: str, name: str) -> dict[str, float]:
    """CPU of this process for a choice with what is reported of it, in ms, of the trace's requests one by one."""
    small = TRACES[trace]
    tokenizer = Tokenizer()
    asks: list[Ask] = []

    async def take(ask: Ask) -> None:
        asks.append(ask)

    await play(small.read(), take)
    async with set_up(name, small, 1) as (_, (ingress,)):
        taken = []
        for number, ask in enumerate(asks):
            pending = make_pending(ask, tokenizer.encode(ask.prompt), number)
            tokens = pending.kwargs.pop("tokens")
            if name == DYNAMO:
                pending.kwargs["request_token_ids"] = tokens
            began = time.process_time()
            replica = await ingress.choose(pending)
            ingress.routed(pending, replica, Result())
            ingress.completed(pending, replica)
            taken.append(time.process_time() - began)
            if name == DYNAMO:
                await ingress.tracker.on_request_completed(pending.metadata.request_id)
    return {"choice_ms": statistics.median(taken) * 1e3}


def run(*arguments: str) -> dict[str, float]:
    """Return the figures of one run, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.virtual", "benchmarks.ray_routing", "--play", *arguments]
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONHASHSEED": "0", "DYN_LOG": "error"}
    answer = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    found: dict[str, float] = json.loads(answer.stdout.splitlines()[-1])
    print(*arguments, found, file=sys.stderr)
    return found


Found = Mapping[tuple[str, int, str], Sequence[Mapping[str, float]]]


def as_markdown(found: Found, choices: Mapping[tuple[str, str], float], *, command: str) -> str:
    """Return the report: medians over the rounds, and ratios within a round."""
    lines = [
        "# Routing in Ray Serve",
        "",
        f"`{command}`. Four simulated replicas in virtual time (CPU is not counted); each request comes to the next "
        "ingress. Ratios are medians of those within one round.",
    ]
    heads = ["ingresses", "router", "mean TTFT, s", "p90, s", "ours of its mean", "prompt tokens cached", "failed"]
    for trace in TRACES:
        rows = []
        for count, name in CELLS:
            runs = found[trace, count, name]
            ratio = statistics.median(
                a["ttft_s"] / b["ttft_s"] for a, b in zip(found[trace, count, OURS], runs, strict=True)
            )
            rows.append(
                [
                    count,
                    name,
                    *(f"{statistics.median(one[each] for one in runs):.3f}" for each in ("ttft_s", "ttft_p90_s")),
                    f"{ratio:.2f}",
                    f"{statistics.median(one['hits'] for one in runs):.3f}",
                    f"{sum(one['failed'] for one in runs):.0f}",
                ]
            )
        lines += ["", f"## {trace.capitalize()}", *table(heads, rows)]
    lines += ["", "## A choice", "", "CPU of the ingress, ms, with what Ray Serve does around it; prompts of:"]
    lines += table(
        ["router", *TRACES], [[name, *(f"{choices[trace, name]:.2f}" for trace in TRACES)] for name in ROUTERS]
    )
    return "\n".join([*lines, ""])


def report(rounds: int) -> None:
    """Play everything and print the report."""
    found: dict[tuple[str, int, str], list[dict[str, float]]] = {}
    for seed in range(1, rounds + 1):
        for trace, (count, name) in itertools.product(TRACES, CELLS):
            row = run(trace, name, str(count), "--seed", str(seed))
            found.setdefault((trace, count, name), []).append(row)
    choices = {
        (trace, name): run(trace, name, "choice")["choice_ms"] for trace, name in itertools.product(TRACES, ROUTERS)
    }
    command = f"python -m benchmarks.ray_routing --rounds {rounds}"
    sys.stdout.write(as_markdown(found, choices, command=command))


def main() -> None:
    """Print the report, or with --play the figures of one run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--play", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    random.seed(args.seed)
    if args.play:
        trace, name, count = args.play
        played = measure_choice(trace, name) if count == "choice" else play_router(trace, name, int(count))
        print(json.dumps(virtual.run(played)))
        return
    report(args.rounds)


if __name__ == "__main__":
    main()
