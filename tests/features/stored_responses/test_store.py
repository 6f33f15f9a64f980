"""The folder of answers: bounds and ages."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest
from msgspec import Raw

from kvproxy.features.stored_responses import store as stores
from kvproxy.features.stored_responses.store import MAX_AGE_S, ResponseStore, StoredResponse, key_of
from tests.support.clock import FakeClock
from tests.support.until import until

MIB = 1024 * 1024


def entry(size: int = 10) -> StoredResponse:
    """Return an answer of about this size."""
    return StoredResponse([Raw(b'"' + b"x" * size + b'"')], Raw(b"{}"))


def names_in(folder: Path) -> list[str]:
    """Return what is kept."""
    return sorted(path.name for path in folder.iterdir())


async def test_an_answer_comes_back_as_it_was(tmp_path: Path) -> None:
    """And is gone once it is removed."""
    store = ResponseStore(tmp_path, max_bytes=MIB)
    assert await store.put("a", entry())
    found = await store.get("a")
    assert found is not None
    assert (bytes(found.items[0]), bytes(found.response)) == (b'"xxxxxxxxxx"', b"{}")
    assert await store.remove("a")
    assert not await store.remove("a")
    assert await store.get("a") is None


async def test_a_folder_that_hangs_holds_up_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls give up, leave the threads of the process alone, and go on once the folder is back."""
    store = ResponseStore(tmp_path, max_bytes=MIB)
    await store.put("a", entry())
    back = threading.Event()
    monkeypatch.setattr(stores, "_TIMEOUT_S", 0.05)
    monkeypatch.setattr(store, "_path", lambda key: back.wait() and tmp_path / f"{key}.json")
    for found in await asyncio.gather(*(store.get("a") for _ in range(20)), return_exceptions=True):
        assert isinstance(found, OSError)
    assert await asyncio.to_thread(lambda: True)
    assert sum(one.name == "stored response" for one in threading.enumerate()) == stores._AT_ONCE
    back.set()
    monkeypatch.setattr(stores, "_TIMEOUT_S", 60.0)
    assert await store.get("a") is not None


async def test_a_client_that_leaves_frees_no_thread_that_still_works(tmp_path: Path) -> None:
    """Else more calls than allowed would run at a time."""
    store = ResponseStore(tmp_path, max_bytes=MIB)
    goes_on = threading.Event()
    call = asyncio.create_task(store._call(goes_on.wait))
    await until(lambda: store._free._value == stores._AT_ONCE - 1)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    assert store._free._value == stores._AT_ONCE - 1
    goes_on.set()
    await until(lambda: store._free._value == stores._AT_ONCE)


async def test_the_longest_unused_go_first(tmp_path: Path) -> None:
    """One that was read counts as used."""
    clock = FakeClock()
    store = ResponseStore(tmp_path, max_bytes=MIB, wall_clock=clock)
    for name in "abcd":
        clock.now += 1
        await store.put(name, entry(MIB // 4))
        clock.now += 1
        await store.get("a")
    await store.put("e", entry(MIB // 4))
    assert names_in(tmp_path) == ["a.json", "d.json", "e.json"]


async def test_an_old_answer_is_not_found_and_swept(tmp_path: Path) -> None:
    """A day after its last use; drafts of processes that were killed, too."""
    clock = FakeClock()
    store = ResponseStore(tmp_path, max_bytes=MIB, wall_clock=clock)
    await store.put("a", entry())
    (tmp_path / "b.1.2").write_text("")
    os.utime(tmp_path / "b.1.2", (clock.now, clock.now))
    clock.now += MAX_AGE_S
    assert await store.get("a") is not None
    clock.now += MAX_AGE_S + 1
    assert await store.get("a") is None
    await store.put("c", entry())
    assert names_in(tmp_path) == ["c.json"]


async def test_a_too_long_history_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written."""
    monkeypatch.setattr(stores, "MAX_ENTRY_BYTES", 20)
    assert not await ResponseStore(tmp_path, max_bytes=MIB).put("a", entry())
    assert not names_in(tmp_path)


def test_keys_differ_by_tenant() -> None:
    """And show neither tenant nor id."""
    assert key_of("a", "resp_1") != key_of("b", "resp_1")
    assert "resp" not in key_of("a", "resp_1")
