"""The thread between the event loop and the disk."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from kvproxy.base.metrics.collectors import CounterCell
from kvproxy.operate.receipts.files import RotatingFile
from kvproxy.operate.receipts.writer import SLICE, Writer


class Bench:
    """A writer of numbers over a file, which can be held."""

    def __init__(self, path: Path, *, limit: int = 1000, interval_s: float = 0.001) -> None:
        self.written, self.dropped, self.failed = CounterCell(), CounterCell(), CounterCell()
        self.gate = threading.Event()
        self.gate.set()
        self.path = path
        file = RotatingFile(path, max_bytes=10**6, max_files=2)
        self.writer: Writer[int] = Writer(
            file, self._encode, limit=limit, written=self.written, dropped=self.dropped, failed=self.failed,
            interval_s=interval_s,
        )  # fmt: skip

    def _encode(self, item: int) -> bytes:
        self.gate.wait()
        return b"%d\n" % (100 // item)

    @property
    def lines(self) -> list[str]:
        return self.path.read_text().split()


def test_closing_writes_what_is_waiting(tmp_path: Path) -> None:
    """In order, more than one slice of it."""
    bench = Bench(tmp_path / "r", interval_s=60.0)
    bench.writer.start()
    for _ in range(3 * SLICE + 1):
        bench.writer.put_item(1)
    assert bench.writer.waiting == 3 * SLICE + 1
    bench.writer.close(10.0)
    assert len(bench.lines) == bench.written.value == 3 * SLICE + 1
    assert bench.dropped.value == 0


def test_a_full_queue_drops_and_counts(tmp_path: Path) -> None:
    """The loop neither waits nor grows."""
    bench = Bench(tmp_path / "r", limit=5, interval_s=60.0)
    bench.writer.start()
    for _ in range(8):
        bench.writer.put_item(1)
    assert (bench.writer.waiting, bench.dropped.value) == (5, 3)
    bench.writer.close(10.0)
    assert len(bench.lines) == 5


def test_a_stuck_disk_does_not_hold_the_shutdown(tmp_path: Path) -> None:
    """Remaining lines are counted as dropped."""
    bench = Bench(tmp_path / "r", interval_s=60.0)
    bench.writer.start()
    bench.gate.clear()
    for _ in range(2 * SLICE):
        bench.writer.put_item(1)
    bench.writer.close(0.02)
    assert bench.dropped.value >= SLICE
    bench.gate.set()


def test_an_item_that_cannot_be_encoded_costs_only_itself(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The thread goes on, and says what happened."""
    bench = Bench(tmp_path / "r")
    bench.writer.start()
    for item in (1, 0, 2):
        bench.writer.put_item(item)
    bench.writer.close(10.0)
    assert bench.lines == ["100", "50"]
    assert (bench.written.value, bench.failed.value) == (2, 1)
    assert "r cannot be written" in caplog.text


def test_a_disk_that_fails_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Every lost line is counted, and the writer tries again with the next ones."""
    bench = Bench(tmp_path / "r")

    def refuse(lines: list[bytes]) -> None:
        raise OSError(28, "No space left on device")

    bench.writer._file.write_lines = refuse  # type: ignore[method-assign,assignment]
    for _ in range(SLICE + 1):
        bench.writer.put_item(1)
    with caplog.at_level(logging.ERROR):
        bench.writer.start()
        bench.writer.close(10.0)
    assert bench.failed.value == SLICE + 1
    assert len(caplog.records) == 1


def test_a_writer_that_was_never_started_can_be_closed(tmp_path: Path) -> None:
    """A start that failed half way ends so."""
    bench = Bench(tmp_path / "r")
    bench.writer.close(1.0)
    assert not (tmp_path / "r").exists()
