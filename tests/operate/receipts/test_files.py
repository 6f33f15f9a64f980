"""Files that rotate: bounded in size and number, never a torn line twice."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvproxy.operate.receipts.files import Ambiguous, ReceiptReader, RotatingFile, list_files
from kvproxy.operate.receipts.receipt import Receipt, encode_receipt


def names(folder: Path) -> list[str]:
    """Return the names of the files."""
    return sorted(path.name for path in folder.iterdir())


def test_full_files_move_back_and_the_oldest_goes(tmp_path: Path) -> None:
    """Lines are never cut; what is kept is the newest, in order."""
    path = tmp_path / "r"
    file = RotatingFile(path, max_bytes=30, max_files=3)
    for number in range(12):
        file.write_lines([b"line %05d\n" % number])  # 11 bytes: two to a file
    file.close()
    assert names(tmp_path) == ["r", "r.1", "r.2"]
    assert [each.read_bytes().split() for each in list_files(path)] == [
        [b"line", b"00010", b"line", b"00011"],
        [b"line", b"00008", b"line", b"00009"],
        [b"line", b"00006", b"line", b"00007"],
    ]


def test_one_write_may_fill_several_files(tmp_path: Path) -> None:
    """A batch is cut at lines, not kept together; a line longer than a file has one of its own."""
    path = tmp_path / "r"
    file = RotatingFile(path, max_bytes=20, max_files=10)
    file.write_lines([b"1" * 15 + b"\n", b"2" * 40 + b"\n", b"3\n", b"4\n"])
    assert [each.read_bytes() for each in list_files(path)] == [b"3\n4\n", b"2" * 40 + b"\n", b"1" * 15 + b"\n"]
    file.close()
    file.close()


def test_with_one_file_it_starts_over(tmp_path: Path) -> None:
    """There is no second one."""
    file = RotatingFile(tmp_path / "r", max_bytes=10, max_files=1)
    file.write_lines([b"12345678\n", b"90\n"])
    file.close()
    assert names(tmp_path) == ["r"]
    assert (tmp_path / "r").read_bytes() == b"90\n"


def test_a_restart_goes_on_and_drops_what_is_beyond_the_bound(tmp_path: Path) -> None:
    """An earlier run may have kept more files."""
    for name in ("r", "r.1", "r.2", "r.3"):
        (tmp_path / name).write_text("old\n")
    file = RotatingFile(tmp_path / "r", max_bytes=100, max_files=2)
    file.write_lines([b"new\n"])
    file.close()
    assert names(tmp_path) == ["r", "r.1"]
    assert (tmp_path / "r").read_text() == "old\nnew\n"


def test_a_restart_counts_what_is_there(tmp_path: Path) -> None:
    """A file that was nearly full is not filled once more."""
    (tmp_path / "r").write_text("o" * 94 + "\n")
    file = RotatingFile(tmp_path / "r", max_bytes=100, max_files=2)
    file.write_lines([b"a new line\n"])
    file.close()
    assert [len((tmp_path / name).read_bytes()) for name in ("r", "r.1")] == [11, 95]


def test_a_line_torn_by_a_full_disk_spoils_only_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next line begins on a line of its own, and readers count the torn one."""
    path = tmp_path / "r"
    file = RotatingFile(path, max_bytes=10_000, max_files=2)
    lines = [encode_receipt(Receipt(time="t", request_id=name, end="completed", duration_s=1.0)) for name in "abc"]
    file.write_lines(lines[:1])
    write = os.write
    full = [lambda fd, data: write(fd, data[:9]), _no_space]
    with monkeypatch.context() as broken:
        broken.setattr(os, "write", lambda fd, data: full.pop(0)(fd, data))
        with pytest.raises(OSError, match="No space"):
            file.write_lines(lines[1:2])
    file.write_lines(lines[2:])
    file.close()
    reading = ReceiptReader(path)
    assert [one.request_id for one in reading.oldest_first()] == ["a", "c"]
    assert reading.broken == 1


def _no_space(fd: int, data: memoryview) -> int:
    raise OSError(28, "No space left on device")


def test_reading_goes_through_the_rotated_files(tmp_path: Path) -> None:
    """Oldest first for replays, newest first for a request id that was used twice; odd ids included."""
    path = tmp_path / "r"
    file = RotatingFile(path, max_bytes=200, max_files=50)
    ids = ["a", 'b"\\', "c", 'b"\\', "e"]
    for number, name in enumerate(ids):
        file.write_lines([encode_receipt(Receipt(time=str(number), request_id=name, end="completed", duration_s=1.0))])
    file.close()
    assert len(names(tmp_path)) > 1
    assert [one.request_id for one in ReceiptReader(path).oldest_first()] == ids
    assert [one.time for one in ReceiptReader(path).find_receipts('b"\\')] == ["3", "1"]
    assert ReceiptReader(path).find_receipts("nobody") == []


def test_a_whole_id_is_that_request_alone(tmp_path: Path) -> None:
    """Other ids may begin with it; a beginning that is no id is good only if one begins so."""
    path = tmp_path / "r"
    file = RotatingFile(path, max_bytes=10_000, max_files=2)
    for name in ("req", "req-1", "req-2", "other"):
        file.write_lines([encode_receipt(Receipt(time="t", request_id=name, end="completed", duration_s=1.0))])
    file.close()
    assert [one.request_id for one in ReceiptReader(path).find_receipts("req")] == ["req"]
    assert [one.request_id for one in ReceiptReader(path).find_receipts("oth")] == ["other"]
    with pytest.raises(Ambiguous, match=r"req-2, req-1|req-1, req-2"):
        ReceiptReader(path).find_receipts("req-")


def test_without_a_file_there_is_nothing_to_read(tmp_path: Path) -> None:
    """And that is said, since the path may be wrong."""
    with pytest.raises(FileNotFoundError):
        list(list_files(tmp_path / "none"))
