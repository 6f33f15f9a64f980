"""Which connection serves a request, how many there may be, and which requests wait."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import weakref

import pytest
from prometheus_client import generate_latest

from kvproxy.base.errors import ConnectError, ConnectTimeout, PoolFull, UnsafeRequest, UpstreamDisconnected
from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.upstream.connection import Connection
from kvproxy.base.upstream.origin import Origin
from kvproxy.base.upstream.origin_pool import OriginPool, PoolLimits
from kvproxy.base.upstream.pool import Timeouts, UpstreamPool
from kvproxy.base.upstream.request import SLICE_BYTES, encode_request
from tests.base.upstream.calls import HEAD_ONLY, OK, PATIENT, fetch, pieces, post, read, until
from tests.support.clock import FakeClock
from tests.support.ports import free_port
from tests.support.scripted import Peer, answer, scripted


async def test_a_finished_connection_serves_the_next_request() -> None:
    """Keep-alive: one connection for requests in a row."""
    async with scripted(answer(OK)) as upstream, UpstreamPool() as pool:
        assert [await fetch(pool, upstream.origin) for _ in range(3)] == [b"ok"] * 3
        assert len(upstream.peers) == 1
        assert (pool.open, pool.idle) == (1, 1)


async def test_the_connection_used_last_is_taken_first() -> None:
    """LIFO: a small working set stays warm, the rest may expire."""
    async with scripted(answer(OK)) as upstream, UpstreamPool() as pool:
        first, second = await asyncio.gather(post(pool, upstream.origin), post(pool, upstream.origin))
        await read(first)
        await read(second)
        await until(lambda: pool.idle == 2)
        for _ in range(4):
            await fetch(pool, upstream.origin)
        assert sorted(len(peer.requests) for peer in upstream.peers) == [1, 5]


async def test_a_response_is_returned_to_the_pool_before_it_is_read() -> None:
    """A response that has arrived whole no longer needs its connection."""
    async with scripted(answer(OK)) as upstream, UpstreamPool() as pool:
        response = await post(pool, upstream.origin)
        assert response.complete
        assert pool.idle == 1
        response.abort()  # must not hurt the connection, which is another request's now
        assert await fetch(pool, upstream.origin) == b"ok"
        assert await read(response) == b"ok"
        assert len(upstream.peers) == 1


async def test_expired_connections_are_not_used() -> None:
    """After idle_timeout_s without a request a connection is closed instead of used."""
    clock = FakeClock()
    async with scripted(answer(OK)) as upstream, UpstreamPool(idle_timeout_s=4, clock=clock) as pool:
        await fetch(pool, upstream.origin)
        clock.advance(3.9)
        await fetch(pool, upstream.origin)
        clock.advance(4.1)
        await fetch(pool, upstream.origin)
        assert [len(peer.requests) for peer in upstream.peers] == [2, 1]


async def test_idle_connections_are_closed_without_further_requests() -> None:
    """A quiet proxy gives its sockets back."""
    async with scripted(answer(OK)) as upstream, UpstreamPool(idle_timeout_s=0.02) as pool:
        await asyncio.gather(fetch(pool, upstream.origin), fetch(pool, upstream.origin))
        await until(lambda: pool.open == 0)


async def test_sweeping_leaves_the_younger_ones() -> None:
    """Each connection has its own idle time."""
    clock = FakeClock()
    async with scripted(answer(OK)) as upstream, UpstreamPool(idle_timeout_s=0.03, clock=clock) as pool:
        first, second = await asyncio.gather(post(pool, upstream.origin), post(pool, upstream.origin))
        assert first.complete
        assert second.complete
        await fetch(pool, upstream.origin)
        clock.advance(0.02)
        await fetch(pool, upstream.origin)  # the warm one again
        clock.advance(0.02)
        await until(lambda: pool.open == 1)
        clock.advance(0.02)
        await until(lambda: pool.open == 0)


async def test_no_more_than_max_idle_are_kept() -> None:
    """And none at all with 0."""
    async with scripted(answer(OK)) as upstream, UpstreamPool(max_idle=1) as pool:
        await asyncio.gather(*[fetch(pool, upstream.origin) for _ in range(3)])
        await until(lambda: pool.open == 1)
    async with scripted(answer(OK)) as upstream, UpstreamPool(idle_timeout_s=0) as pool:
        await fetch(pool, upstream.origin)
        await until(lambda: pool.open == 0)


async def test_an_idle_connection_that_dies_leaves_at_once() -> None:
    """The peer's close is noticed when it happens, not at the next request."""

    async def once(peer: Peer) -> None:
        await peer.request()
        await peer.send(OK)

    async with scripted(once) as upstream, UpstreamPool() as pool:
        await fetch(pool, upstream.origin)
        await until(lambda: pool.open == 0)


async def test_bytes_on_an_idle_connection_drop_it() -> None:
    """They would be read as the answer to the next request."""
    stray = asyncio.Event()

    async def talkative(peer: Peer) -> None:
        await peer.request()
        await peer.send(OK)
        await stray.wait()
        await peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil")
        await peer.gone()

    async with scripted(talkative, answer(OK)) as upstream, UpstreamPool(idle_timeout_s=3600) as pool:
        await fetch(pool, upstream.origin)
        stray.set()
        await until(lambda: pool.open == 0)
        assert await fetch(pool, upstream.origin) == b"ok"


async def test_a_dead_kept_connection_is_replaced_once() -> None:
    """A reused connection that dies before any byte: the request goes out again on a fresh one."""

    async def dies_on_the_second(peer: Peer) -> None:
        await peer.request()
        await peer.send(OK)
        await peer.request()
        peer.reset()

    metrics = Metrics()
    async with scripted(dies_on_the_second, answer(OK)) as upstream, UpstreamPool(metrics=metrics) as pool:
        await fetch(pool, upstream.origin)
        assert await fetch(pool, upstream.origin, b"again") == b"ok"
        assert upstream.peers[1].requests[0].endswith(b"again")
        assert b"kvproxy_upstream_replays_total 1.0" in generate_latest(metrics.registry)


async def test_a_replacement_waits_no_longer_for_a_connection_than_any_other_request() -> None:
    """The slot of the dead connection went to the next in line, which keeps it."""
    second_waits = asyncio.Event()

    async def dies_later(peer: Peer) -> None:
        await peer.request()
        await peer.send(OK)
        await peer.request()
        await second_waits.wait()
        peer.reset()

    async def never(peer: Peer) -> None:
        await peer.request()
        await peer.gone()

    timeouts = Timeouts(connect_s=0.5, first_byte_s=3600, idle_s=3600)
    async with scripted(dies_later, never) as upstream, UpstreamPool(max_connections=1) as pool:
        await fetch(pool, upstream.origin)
        first = asyncio.create_task(post(pool, upstream.origin, timeouts=timeouts))
        await until(lambda: len(upstream.peers[0].requests) == 2)
        second = asyncio.create_task(post(pool, upstream.origin, timeouts=timeouts))
        await until(lambda: pool.waiting == 1)
        second_waits.set()
        with pytest.raises(PoolFull):
            async with asyncio.timeout(60):
                await first
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)


async def test_a_long_body_goes_up_in_slices_and_can_be_sent_again() -> None:
    """A body that is there whole is no stream: a dead kept connection costs it nothing."""

    async def dies_on_the_second(peer: Peer) -> None:
        await peer.request()
        await peer.send(OK)
        await peer.request()
        peer.reset()

    body = b"".join(b"%07d " % number for number in range(SLICE_BYTES // 2))
    async with scripted(dies_on_the_second, answer(OK)) as upstream, UpstreamPool() as pool:
        for _ in range(3):
            assert await fetch(pool, upstream.origin, body) == b"ok"
        first, second = upstream.peers
        assert len(first.requests) == len(second.requests) == 2
        assert {request.partition(b"\r\n\r\n")[2] == body for request in first.requests + second.requests} == {True}


async def test_other_tasks_have_their_turn_between_slices() -> None:
    """The kernel takes what it is given in one go."""
    turns, body = 0, b"x" * (4 * SLICE_BYTES + 1)

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    upload = encode_request(Origin("http", "x", 1), b"POST", target=b"/", headers=[], body=body).upload()
    assert upload is not None
    slices = [(len(piece), turns) async for piece in upload]
    counting.cancel()
    assert [size for size, _ in slices] == [SLICE_BYTES] * 4 + [1]
    assert [turn for _, turn in slices] == sorted({turn for _, turn in slices})


async def test_the_replacement_is_a_new_connection_even_with_all_slots_taken() -> None:
    """Another kept one would most likely be as dead; the oldest idle one makes room."""

    async def dies_later(peer: Peer) -> None:
        await peer.request()
        await peer.send(OK)
        await peer.request()
        peer.reset()

    async with (
        scripted(dies_later, dies_later, answer(OK)) as upstream,
        UpstreamPool(max_connections=2) as pool,
    ):
        first, second = await asyncio.gather(post(pool, upstream.origin), post(pool, upstream.origin))
        assert first.complete
        assert second.complete
        assert await fetch(pool, upstream.origin) == b"ok"
        assert len(upstream.peers) == 3


@pytest.mark.parametrize("first_answer", [b"", b"HTTP/1.1 20"], ids=["no byte", "some bytes"])
async def test_a_fresh_connection_that_dies_is_an_error(first_answer: bytes) -> None:
    """Only a kept connection is given the benefit of the doubt."""

    async def dies(peer: Peer) -> None:
        await peer.request()
        await peer.send(first_answer)

    async with scripted(dies) as upstream, UpstreamPool() as pool:
        with pytest.raises(UpstreamDisconnected):
            await fetch(pool, upstream.origin)
        assert len(upstream.peers) == 1


async def test_no_replay_after_a_byte_of_the_response() -> None:
    """The engine has seen the request: another one would run it twice."""

    async def dies_in_the_head(peer: Peer) -> None:
        await peer.request()
        await peer.send(OK)
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\n")

    async with scripted(dies_in_the_head) as upstream, UpstreamPool() as pool:
        await fetch(pool, upstream.origin)
        with pytest.raises(UpstreamDisconnected):
            await fetch(pool, upstream.origin)
        assert len(upstream.peers) == 1


async def test_no_replay_of_a_body_that_is_gone() -> None:
    """An iterated body cannot be sent twice."""

    async def dies_on_the_second(peer: Peer) -> None:
        await peer.request()
        await peer.send(OK)
        await peer.request()

    async with scripted(dies_on_the_second) as upstream, UpstreamPool() as pool:
        await fetch(pool, upstream.origin)
        with pytest.raises(UpstreamDisconnected):
            await fetch(pool, upstream.origin, pieces(b"a"))
        assert len(upstream.peers) == 1


async def test_the_line_is_first_in_first_out() -> None:
    """With every connection busy, requests wait and are served in the order they came."""
    order: list[bytes] = []

    async def record(peer: Peer) -> None:
        while True:
            order.append((await peer.request())[-1:])
            await peer.send(OK)

    async with scripted(record) as upstream, UpstreamPool(max_connections=1) as pool:
        results = [asyncio.create_task(fetch(pool, upstream.origin, b"%d" % n)) for n in range(6)]
        assert await asyncio.gather(*results) == [b"ok"] * 6
        assert order == [b"%d" % n for n in range(6)]
        assert len(upstream.peers) == 1


async def test_a_full_line_refuses() -> None:
    """The bound on waiting requests is exact, and the refusal immediate."""
    async with scripted(answer(HEAD_ONLY)) as upstream, UpstreamPool(max_connections=1, max_waiting=1) as pool:
        busy = await post(pool, upstream.origin)
        waiting = asyncio.create_task(post(pool, upstream.origin))
        await until(lambda: pool.waiting == 1)
        with pytest.raises(PoolFull, match="1 requests waiting"):
            await post(pool, upstream.origin)
        busy.abort()
        (await waiting).abort()


async def test_waiting_is_bounded_by_the_connect_timeout() -> None:
    """A request waits for a connection as long as for connecting, then gets PoolFull."""
    async with scripted(answer(HEAD_ONLY)) as upstream, UpstreamPool(max_connections=1) as pool:
        busy = await post(pool, upstream.origin)
        with pytest.raises(PoolFull, match=r"within 0\.02 s"):
            await post(pool, upstream.origin, timeouts=Timeouts(connect_s=0.02))
        assert pool.waiting == 0
        busy.abort()


async def test_cancelled_waiters_leak_nothing() -> None:
    """Whatever a waiter was handed in the moment it was cancelled goes to the next in line."""
    async with scripted(answer(OK)) as upstream, UpstreamPool(max_connections=2) as pool:
        for turns in range(12):
            tasks = [asyncio.create_task(fetch(pool, upstream.origin)) for _ in range(8)]
            for _ in range(turns):
                await asyncio.sleep(0)
            for task in tasks[::2]:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert results[1::2] == [b"ok"] * 4
            await until(lambda: pool.open == pool.idle)
        assert pool.waiting == 0
        assert pool.open <= 2


async def test_a_slot_handed_to_a_waiter_that_leaves_in_the_same_turn_is_free_again() -> None:
    """It has no task any more that could open a connection in it."""
    origin = Origin.parse("http://127.0.0.1:1")
    lane = OriginPool(origin, PoolLimits(1, 1, 4.0, 8), clock=FakeClock(), on_empty=lambda _: None)
    assert lane.reserve_slot()
    waiter = asyncio.create_task(lane.wait_in_line(0))
    await until(lambda: lane.waiting == 1)
    lane.free_slot()
    waiter.cancel()
    await asyncio.gather(waiter, return_exceptions=True)
    assert (lane.open, lane.waiting) == (0, 0)


async def test_a_failed_connect_passes_its_slot_on() -> None:
    """The line does not stall behind a connection that never came to be."""
    origin = Origin("http", "127.0.0.1", free_port())
    async with UpstreamPool(max_connections=1) as pool:
        results = await asyncio.gather(*[post(pool, origin) for _ in range(4)], return_exceptions=True)
        assert [type(result) for result in results] == [ConnectError] * 4
        assert (pool.open, pool.waiting) == (0, 0)


async def test_an_impossible_name_is_a_connect_error() -> None:
    """A label over 63 bytes fails in the name codec, not in the resolver."""
    async with UpstreamPool() as pool:
        with pytest.raises(ConnectError):
            await post(pool, Origin("http", "a" * 80 + ".invalid", 80))
        assert pool.open == 0


async def test_a_connect_that_hangs_times_out() -> None:
    """A listener whose backlog is full answers no SYN."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
        metrics = Metrics()
        async with UpstreamPool(metrics=metrics) as pool:
            with pytest.raises(ConnectTimeout):
                await post(pool, Origin("http", "127.0.0.1", port), timeouts=Timeouts(connect_s=0.03))
            assert pool.open == 0
        for filler in fillers:
            filler.close()
    assert b'kvproxy_upstream_connects_total{outcome="connect_timeout"} 1.0' in generate_latest(metrics.registry)


async def test_an_unsafe_request_takes_no_connection() -> None:
    """It is refused before anything is opened."""
    async with UpstreamPool() as pool:
        with pytest.raises(UnsafeRequest):
            await post(pool, Origin("http", "127.0.0.1", 1), headers=[(b"a", b"b\r\nc: d")])
        assert pool.open == 0


async def test_leaving_closes_everything() -> None:
    """Idle, busy and waiting requests end; later ones are refused."""
    async with scripted(answer(HEAD_ONLY)) as upstream:
        async with UpstreamPool(max_connections=1) as pool:
            busy = await post(pool, upstream.origin)
            waiting = asyncio.create_task(post(pool, upstream.origin))
            await until(lambda: pool.waiting == 1)
        with pytest.raises(UpstreamDisconnected):
            await busy.next_chunk()
        with pytest.raises(ConnectError):
            await waiting
        with pytest.raises(ConnectError):
            await post(pool, upstream.origin)
        await until(lambda: pool.open == 0)


async def test_leaving_while_connecting_leaves_no_socket() -> None:
    """A connection that comes to be after the end is closed."""
    async with scripted(answer(OK)) as upstream:
        async with UpstreamPool() as pool:
            opening = asyncio.create_task(post(pool, upstream.origin))
            await asyncio.sleep(0)
        with pytest.raises(ConnectError):
            await opening
        await until(lambda: pool.open == 0)


async def test_leaving_ends_uploads() -> None:
    """No task outlives the pool."""
    never = asyncio.Event()
    async with scripted(answer(OK)) as upstream:
        async with UpstreamPool() as pool:
            sending = asyncio.create_task(post(pool, upstream.origin, pieces(b"a", then=never)))
            await until(lambda: bool(upstream.peers))
        with pytest.raises(UpstreamDisconnected):
            await sending
        assert not [task for task in asyncio.all_tasks() if task.get_name() == "upstream upload"]


async def test_gauges_show_what_is_held() -> None:
    """Connections, waiting requests and their bound, read at scrape time."""
    metrics = Metrics()
    async with (
        scripted(answer(OK)) as upstream,
        UpstreamPool(metrics=metrics, max_waiting=7) as pool,
    ):
        await fetch(pool, upstream.origin)
        text = generate_latest(metrics.registry).decode()
    for line in (
        'kvproxy_upstream_connections{state="open"} 1.0',
        'kvproxy_upstream_connections{state="idle"} 1.0',
        'kvproxy_queue_depth{queue="upstream"} 0.0',
        'kvproxy_queue_limit{queue="upstream"} 7.0',
        'kvproxy_upstream_connects_total{outcome="ok"} 1.0',
    ):
        assert line in text


async def test_nagle_is_off() -> None:
    """TCP_NODELAY: without it a head followed by a body waits 40 ms for the peer's delayed acknowledgement."""
    async with scripted(answer(OK)) as upstream, UpstreamPool() as pool:
        await fetch(pool, upstream.origin)
        (origin_pool,) = pool._pools.values()
        connection = origin_pool.acquire_idle()
        assert connection is not None
        sock = connection._transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
        connection.close()


async def test_a_small_request_goes_out_in_one_piece() -> None:
    """Head and body in one write: one packet, one read at the engine."""
    seen: list[bytes] = []

    async def first_read(peer: Peer) -> None:
        seen.append(await peer.reader.read(65536))
        await peer.send(OK)

    async with scripted(first_read) as upstream, UpstreamPool() as pool:
        response = await pool.request(upstream.origin, b"POST", b"/v1", [(b"a", b"b")], b"hello", timeouts=PATIENT)
        assert response.status == 200
        host = upstream.origin.host_header
        assert seen == [b"POST /v1 HTTP/1.1\r\nhost: " + host + b"\r\na: b\r\ncontent-length: 5\r\n\r\nhello"]


async def test_a_failed_request_is_freed_at_once() -> None:
    """A cycle of its error and the frames behind that would keep the body until all garbage is collected."""
    body = pieces(b"hello")
    held = weakref.ref(body)
    gc.disable()
    try:
        async with scripted(closes_unanswered) as upstream, UpstreamPool() as pool:
            with contextlib.suppress(UpstreamDisconnected):
                await post(pool, upstream.origin, body)
            del body
            await until(lambda: pool.open == 0)
            assert held() is None
    finally:
        gc.enable()


async def test_a_refused_connection_leaves_no_cycle() -> None:
    """An outage has thousands of them a minute; uvloop makes a protocol for each."""
    async with UpstreamPool() as pool:
        origin = Origin.parse(f"http://127.0.0.1:{free_port()}")
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            with pytest.raises(ConnectError):
                await post(pool, origin)
            gc.collect()
            assert [one for one in gc.garbage if type(one) is Connection] == []
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()


async def closes_unanswered(peer: Peer) -> None:
    """Read a request, and say nothing."""
    await peer.request()
