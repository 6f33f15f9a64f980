"""Durations, sizes and secrets as people write them."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from kvproxy.base.settings.model import Model, Secret, parse_duration_s, parse_size_bytes


class _Holder(Model):
    key: Secret


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        ("50ms", 0.05), ("2s", 2.0), ("5m", 300.0), ("1m30s", 90.0), ("1h2m3.5s", 3723.5), ("100us", 1e-4),
        ("100µs", 1e-4), ("1d", 86400.0), ("7ns", 7e-9), ("0", 0.0), (0, 0.0), (2, 2.0), (0.25, 0.25), ("1.5", 1.5),
        (" 3s ", 3.0), ("2 s", 2.0), ("5min", 300.0), ("10 minutes", 600.0),
        ("1 hour 30 min", 5400.0), ("90 secs", 90.0),
    ],
)  # fmt: skip
def test_durations(written: Any, seconds: float) -> None:
    """Units, Go's composed form, and bare seconds."""
    assert parse_duration_s(written) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "written",
    [
        "",
        "5 furlongs",
        "5 mi",
        "1 2s",
        "5minute s",
        "-1s",
        "1s-",
        "s",
        "1x",
        "1s2",
        "nan",
        "inf",
        True,
        None,
        [],
        -1,
        math.inf,
        math.nan,
    ],
)
def test_invalid_durations(written: Any) -> None:
    """Everything else is refused, negative and non-finite numbers included."""
    with pytest.raises(ValueError, match="duration"):
        parse_duration_s(written)


@given(st.integers(0, 23), st.integers(0, 59), st.integers(0, 59), st.integers(0, 999))
def test_composed_durations_round_trip(hours: int, minutes: int, seconds: int, millis: int) -> None:
    """The parts of Go's form add up exactly."""
    expected = hours * 3600 + minutes * 60 + seconds + millis / 1000
    assert parse_duration_s(f"{hours}h{minutes}m{seconds}s{millis}ms") == pytest.approx(expected, abs=1e-9)


@given(st.floats(0, 1e9, allow_subnormal=False))
def test_numbers_of_seconds_round_trip(seconds: float) -> None:
    """A number means the same bare, as text and with its unit."""
    assert parse_duration_s(seconds) == seconds
    assert parse_duration_s(repr(seconds)) == seconds
    assert parse_duration_s(f"{seconds:.9f}s") == pytest.approx(seconds, abs=1e-8)


@pytest.mark.parametrize(
    ("written", "size"),
    [
        ("8MiB", 8 * 1024**2), ("64KB", 64_000), ("64kb", 64_000), ("1g", 1000**3), ("2Ti", 2 * 1024**4),
        ("1.5KiB", 1536), ("10", 10), (10, 10), ("10b", 10), ("3 MiB", 3 * 1024**2),
    ],
)  # fmt: skip
def test_sizes(written: Any, size: int) -> None:
    """Binary and decimal units, and bare bytes."""
    assert parse_size_bytes(written) == size


@pytest.mark.parametrize("written", ["", "MiB", "-1", -1, "1xb", "1ib", True, None, 1.5, [], "1 2"])
def test_invalid_sizes(written: Any) -> None:
    """Everything else is refused."""
    with pytest.raises(ValueError, match="size"):
        parse_size_bytes(written)


@given(
    st.integers(0, 2**40), st.sampled_from([("", 1), ("KiB", 1024), ("MiB", 1024**2), ("kB", 1000), ("MB", 1000**2)])
)
def test_sizes_round_trip(number: int, unit: tuple[str, int]) -> None:
    """Number and unit multiply without rounding."""
    assert parse_size_bytes(f"{number}{unit[0]}") == number * unit[1]


def test_a_secret_is_never_shown() -> None:
    """Neither repr, str, dumps nor JSON contain it."""
    holder = _Holder.model_validate({"key": "sk-topsecret"})
    assert holder.key.get_secret_value() == "sk-topsecret"
    shown = f"{holder!r} {holder} {holder.model_dump()} {holder.model_dump_json()}"
    assert "topsecret" not in shown


def test_a_secret_from_a_file(tmp_path: Path) -> None:
    """`{file: PATH}` reads the text without the line end."""
    file = tmp_path / "key"
    file.write_text("sk-from-file\n")
    assert _Holder.model_validate({"key": {"file": str(file)}}).key.get_secret_value() == "sk-from-file"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"topsecret\nsecond line", "line break"),
        (b"\xff\xfetopsecret", "UTF-8"),
        (b"topsecret" * 8000, "larger"),
    ],
)
def test_a_bad_secret_file(tmp_path: Path, content: bytes, message: str) -> None:
    """The message says what is wrong and quotes nothing of it."""
    file = tmp_path / "key"
    file.write_bytes(content)
    with pytest.raises(ValidationError) as caught:
        _Holder.model_validate({"key": {"file": str(file)}})
    assert message in str(caught.value)
    assert "topsecret" not in str(caught.value)


@pytest.mark.parametrize(
    "written", ["", {"file": 5}, {"file": "x", "other": "topsecret"}, {"path": "topsecret"}, 5, None]
)
def test_invalid_secrets(written: Any) -> None:
    """Empty text would be a key that every client has; other forms are refused without being quoted."""
    with pytest.raises(ValidationError) as caught:
        _Holder.model_validate({"key": written})
    assert "topsecret" not in str(caught.value)


def test_a_missing_secret_file() -> None:
    """The file is named, so that it can be found."""
    with pytest.raises(ValidationError, match="'/nowhere/key': No such file"):
        _Holder.model_validate({"key": {"file": "/nowhere/key"}})


def test_a_pipe_in_place_of_a_secret_file(tmp_path: Path) -> None:
    """It would be waited for, in the event loop where a source of endpoints may name files."""
    pipe = tmp_path / "key"
    os.mkfifo(pipe)
    with pytest.raises(ValidationError, match="key': not a regular file"):
        _Holder.model_validate({"key": {"file": str(pipe)}})
