"""One file: the old one or the new one, whatever happens."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from kvproxy.features.snapshot.restart import SnapshotFile
from kvproxy.operate.runtime.approximate_dump import fingerprint
from kvproxy.operate.runtime.saved_state import Kept, Outcome, Unusable, encode

NOW = 1_800_000_000.0


def pieces(taken_at: float) -> list[bytes]:
    return encode(Kept(taken_at, fingerprint(), {}, []), [])


def file_at(path: Path, **changes: object) -> SnapshotFile:
    return SnapshotFile(path, **{"max_bytes": 4096, "wall_clock": lambda: NOW, **changes})  # type: ignore[arg-type]


def outcome_of(file: SnapshotFile) -> Outcome:
    with pytest.raises(Unusable) as caught:
        file.read()
    return caught.value.outcome


def test_the_last_written_entry_is_read(tmp_path: Path) -> None:
    """For its owner's eyes, and with nothing beside it."""
    file = file_at(tmp_path / "snapshot")
    file.write(pieces(1.0))
    size = file.write(pieces(2.0))
    assert file.read().kept.taken_at == 2.0
    about = (tmp_path / "snapshot").stat()
    assert (about.st_mode & 0o777, about.st_size) == (0o600, size)
    assert [one.name for one in tmp_path.iterdir()] == ["snapshot"]


def test_no_file_yet(tmp_path: Path) -> None:
    """The first start of all."""
    assert outcome_of(file_at(tmp_path / "snapshot")) is Outcome.NONE


def test_a_disk_that_fills_up_leaves_the_old_file(tmp_path: Path) -> None:
    """And no torso of the new one."""
    written = 0

    def full(descriptor: int, data: memoryview) -> int:
        nonlocal written
        if written > 10:
            raise OSError(errno.ENOSPC, "No space left on device")
        written += os.write(descriptor, data[:6])
        return 6

    path = tmp_path / "snapshot"
    file_at(path).write(pieces(1.0))
    with pytest.raises(OSError, match="No space"):
        file_at(path, write=full).write(pieces(2.0))
    assert written == 12
    assert file_at(path).read().kept.taken_at == 1.0
    assert [one.name for one in tmp_path.iterdir()] == ["snapshot"]


def test_short_writes_are_gone_on_with(tmp_path: Path) -> None:
    """A signal may cut a write."""
    file = file_at(tmp_path / "snapshot", write=lambda descriptor, data: os.write(descriptor, data[:3]))
    file.write(pieces(3.0))
    assert file.read().kept.taken_at == 3.0


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    """Neither written nor read, and said as what it is."""
    file = file_at(tmp_path / "nowhere" / "snapshot")
    with pytest.raises(FileNotFoundError):
        file.write(pieces(1.0))
    assert outcome_of(file) is Outcome.NONE


def test_a_larger_file_than_allowed_is_not_read(tmp_path: Path) -> None:
    """A foreign file of gigabytes must not fill the memory."""
    path = tmp_path / "snapshot"
    path.write_bytes(bytes(5000))
    assert outcome_of(file_at(path)) is Outcome.TOO_LARGE


def test_pipes_and_devices_are_not_waited_for(tmp_path: Path) -> None:
    """Opening a pipe without a writer would hang; a folder cannot be read."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(OSError, match=r"regular file|directory"):
            file_at(tmp_path / name).read()


def test_leftovers_of_a_killed_writer_are_removed(tmp_path: Path) -> None:
    """At the next start, unless it is so young that a process may be at it still; other files are left alone."""
    for name, age_s in (
        (".snap[1].old.tmp", 601),
        (".snap[1].new.tmp", 599),
        (".snap1.old.tmp", 9999),
        ("x.tmp", 9999),
    ):
        (tmp_path / name).write_bytes(b"x")
        os.utime(tmp_path / name, (NOW - age_s, NOW - age_s))
    assert outcome_of(file_at(tmp_path / "snap[1]")) is Outcome.NONE
    assert sorted(one.name for one in tmp_path.iterdir()) == [".snap1.old.tmp", ".snap[1].new.tmp", "x.tmp"]


def test_a_rename_that_fails_leaves_nothing(tmp_path: Path) -> None:
    """The path is a folder."""
    (tmp_path / "snapshot").mkdir()
    with pytest.raises(OSError, match=r"directory"):
        file_at(tmp_path / "snapshot").write(pieces(1.0))
    assert [one.name for one in tmp_path.iterdir()] == ["snapshot"]
