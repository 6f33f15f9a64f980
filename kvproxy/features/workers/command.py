"""One worker of several: a process that the supervisor starts, with the descriptor of the line to it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import faulthandler
import signal
import socket
from contextlib import AsyncExitStack

from kvproxy.app import Proxy
from kvproxy.features.workers.assignment import Assignment, Link, receive_assignment, remove_left_folder, take_share
from kvproxy.features.workers.control import ControlApp
from kvproxy.operate.commands.last_resort import END_GRACE_S, LastResort
from kvproxy.operate.commands.logging_setup import log_to
from kvproxy.operate.commands.serving import diagnosis, public_listener, run_bounded, run_loop
from kvproxy.operate.companion import Siblings
from kvproxy.proxy.listener.server import Server

#: A sibling that does not answer must not keep a worker from serving.
_JOIN_S = 3.0


def main(args: argparse.Namespace) -> int:
    """Serve until the supervisor sends the end, or is gone."""
    faulthandler.register(signal.SIGUSR1)  # prints the stacks of a hanging worker before it is killed
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a terminal sends it to every process; the supervisor decides
    line = socket.socket(fileno=args.line)
    try:
        assignment = receive_assignment(line)
    except EOFError:
        return 1
    with log_to(assignment.config.log), LastResort() as last_resort:
        return run_loop(lambda: run_bounded(serve_as_worker(assignment, line, last_resort), last_resort))


async def serve_as_worker(assignment: Assignment, line: socket.socket, last_resort: LastResort) -> int:
    """Run the worker's whole life. It serves once it has the others' state, and the operator's earlier changes."""
    link = Link(line)
    link.install()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, link.stop.set)  # as on the supervisor's order
    config = take_share(assignment.config, assignment.index, assignment.count)
    siblings = Siblings(assignment.folder, assignment.index, assignment.count)
    async with (
        Proxy(config, receipts_key=assignment.receipts_key, siblings=siblings) as proxy,
        AsyncExitStack() as listeners,
    ):
        control = ControlApp(proxy, assignment)
        await control.repeat_changes(assignment.changes)
        own = [socket.socket(fileno=assignment.control)]
        await listeners.enter_async_context(Server(control, sockets=own, drain_s=1.0))
        await _until_joined(proxy)
        public = [socket.socket(fileno=number) for number in assignment.public]
        await listeners.enter_async_context(public_listener(proxy, hurry=link.hurry, sockets=public))
        if assignment.index == 0:  # one visit is enough
            await listeners.enter_async_context(diagnosis(proxy))
        link.say_ready()
        await link.stop.wait()
        last_resort.end_within(config.shutdown.drain + END_GRACE_S)
        proxy.draining = True
    if link.cut:
        remove_left_folder(assignment.folder)
    return 0


async def _until_joined(proxy: Proxy) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_JOIN_S):
            while any(one.joining for one in proxy.companions):  # noqa: ASYNC110 - it tells no one
                await asyncio.sleep(0.01)
