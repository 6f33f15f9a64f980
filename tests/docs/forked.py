"""`kvproxy` for shells that start it many times: a process that has loaded it forks for each command. Loading takes a
second; otherwise a command runs as if started by itself, with its own arguments, environment, folder and streams.

`python -m tests.docs.forked SOCKET` waits for the program that `write_program` writes."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import httpcore  # noqa: F401 - httpx loads it with the first client

#: Modules of the commands that pages show. Others are loaded by the command itself.
LOADED = (
    "app",
    "lab.advise.command",
    "lab.demo.demo",
    "lab.planner.command",
    "lab.replay.command",
    "operate.commands.configuration",
    "operate.commands.doctor",
    "operate.commands.explain",
    "operate.commands.init",
    "operate.commands.operate",
    "operate.commands.serve",
    "operate.commands.status",
)
_STREAMS = (0, 1, 2)
_PROGRAM = """#!{python} -IS
import json, os, signal, socket, sys
numbers = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
signal.pthread_sigmask(signal.SIG_BLOCK, numbers)  # those that come before the command's process is known wait
link = socket.socket(socket.AF_UNIX)
link.connect({path!r})
request = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(link, [len(request).to_bytes(4, "big")], [0, 1, 2])
link.sendall(request)
answers = link.makefile()
pid = int(answers.readline())
for number in numbers:
    signal.signal(number, lambda number, _: os.kill(pid, number))
signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
status = int(answers.readline())
sys.exit(status if status >= 0 else 128 - status)
"""


def write_program(path: Path, server: Path) -> None:
    """Write the program that has the command run by the process at the socket `server`."""
    path.write_text(_PROGRAM.format(python=sys.executable, path=str(server)))
    path.chmod(0o755)


def serve(path: str) -> None:
    """Fork for each program until SIGTERM. Returns only in the process of a command, with its arguments."""
    for name in LOADED:
        importlib.import_module(f"kvproxy.{name}")
    gc.freeze()  # a collection in the child would copy every page
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for keepers
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(64)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while True:
            link, _ = listener.accept()
            if os.fork() == 0:
                break
            link.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _keep(link)


def _keep(link: socket.socket) -> None:
    """Start the command and send its status at its end. The command is killed when its program is gone. Returns only
    in the command's process."""
    length, streams, _, _ = socket.recv_fds(link, 4, len(_STREAMS))
    arguments, folder, environment = json.loads(_read(link, int.from_bytes(length, "big")))
    if (pid := os.fork()) == 0:
        link.close()
        _become(streams, folder, environment)
        sys.argv[1:] = arguments
        return
    for stream in streams:
        os.close(stream)
    with contextlib.suppress(OSError):
        link.sendall(f"{pid}\n".encode())
    ended = os.pidfd_open(pid)
    ready, _, _ = select.select([ended, link.fileno()], [], [])
    if ended not in ready:
        os.kill(pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(OSError):
        link.sendall(f"{status}\n".encode())
    os._exit(0)


def _read(link: socket.socket, size: int) -> bytes:
    with link.makefile("rb", buffering=0) as file:
        return b"".join(_pieces(file, size))


def _pieces(file: socket.SocketIO, size: int) -> Iterator[bytes]:
    while size:
        piece = file.read(size)
        assert piece, "the program ended"
        size -= len(piece)
        yield piece


def _become(streams: list[int], folder: str, environment: dict[str, str]) -> None:
    for own, given in zip(_STREAMS, streams, strict=True):
        os.dup2(given, own)
        os.close(given)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(":"))


if __name__ == "__main__":
    serve(sys.argv[1])
    from kvproxy.cli import main

    sys.exit(main())
