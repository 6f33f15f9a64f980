"""Which process listens on a port, as far as this user may see: for the message when it is taken. Linux only."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_LISTENING = "0A"


def holder_of(port: int, *, proc: Path = Path("/proc")) -> str:
    """`python3 (pid 4711)`, or empty when it cannot be told."""
    sockets = {f"socket:[{inode}]" for inode in _inodes(port, proc)}
    if not sockets:
        return ""
    for process in proc.iterdir():
        if process.name.isdigit() and _holds(process, sockets):
            return f"{_name_of(process)} (pid {process.name})"
    return ""


def _inodes(port: int, proc: Path) -> Iterator[str]:
    for table in ("tcp", "tcp6"):
        try:
            lines = (proc / "net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                yield fields[9]


def _holds(process: Path, sockets: set[str]) -> bool:
    try:
        return any(_target(file) in sockets for file in (process / "fd").iterdir())
    except OSError:
        return False


def _target(file: Path) -> str:
    try:
        return os.readlink(file)
    except OSError:
        return ""


def _name_of(process: Path) -> str:
    try:
        return (process / "comm").read_text().strip()
    except OSError:
        return "a process"
