"""The precise index fed with what real vLLM servers published."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvproxy.cache.indexes.beginnings import PreciseMatch
from kvproxy.cache.indexes.precise import PreciseIndex, precise_root
from kvproxy.cache.prefix.hashing import token_blocks
from kvproxy.features.kv_events.decoding import Skipped, decode_batch
from tests.cache.indexes.support import A

CAPTURES = Path(__file__).parents[2] / "fixtures" / "vllm_events"


def captured(name: str, *, source: str = "") -> Iterator[dict[str, Any]]:
    """Yield the messages of one capture; the mini fixture joins several servers', told apart by `src`."""
    for line in (CAPTURES / name).read_text().splitlines():
        message = json.loads(line)
        if not source or message.get("src") == source:
            yield message


def apply(index: PreciseIndex, message: dict[str, Any]) -> None:
    skipped: Skipped = {}
    batch = decode_batch([bytes.fromhex(frame) for frame in message["frames_hex"]])
    index.apply_events(A, message["decoded"][2] or 0, list(batch.events(skipped)))
    assert not skipped


def tokens_stored(message: dict[str, Any]) -> array[int]:
    """Tokens of the message's last store."""
    event = [e for e in message["decoded"][1] if (e["type"] if isinstance(e, dict) else e[0]) == "BlockStored"][-1]
    return array("I", event["token_ids"] if isinstance(event, dict) else event[3])


def lookup(
    index: PreciseIndex, tokens: array[int], *, lora: str = "", salt: str | None = None
) -> dict[str, PreciseMatch]:
    return dict(
        index.match_prompt(lambda size: token_blocks(tokens, size, precise_root(size, lora=lora, cache_salt=salt)))
    )


@pytest.mark.parametrize(("source", "size"), [("scenarios_bs32_int", 32), ("scenarios_bs64_bytes_xxhash", 64)])
def test_a_conversation_of_a_real_server(source: str, size: int) -> None:
    """Cold prompt, exact multiple, extension, a full block of decode, a salted prompt, a full re-report."""
    index = PreciseIndex()
    known: dict[str, array[int]] = {}
    for message in captured("mini_fixture.jsonl", source=source):
        apply(index, message)
        known[message["scenario"]] = tokens_stored(message)
    cold = known["cold_100"]
    whole = cold + known["extend_200"]
    assert lookup(index, cold) == {A: PreciseMatch(len(cold), (), 0)}
    assert lookup(index, whole) == {A: PreciseMatch(len(whole), (), 0)}
    assert lookup(index, known["decode_growth"]) == {A: PreciseMatch(size, (), 0)}
    salted = known["salt"]
    assert lookup(index, salted, salt="tenant-a") == {A: PreciseMatch(len(salted), (), 0)}
    assert lookup(index, cold, salt="tenant-a") == {}
    assert index.counts.orphaned == index.counts.malformed == 0


def test_a_real_eviction() -> None:
    """Blocks never heard of are removed without harm, and the repeated prompt is there again."""
    index = PreciseIndex()
    messages = [m for m in captured("mini_fixture.jsonl") if m["scenario"] == "after_evict_repeat_100"]
    assert messages
    for message in messages:
        apply(index, message)
    assert index.counts.removed_unknown == 4
    assert lookup(index, tokens_stored(messages[-1]))[A].device_tokens == 96


def test_loras_of_a_real_server() -> None:
    """The same prompt under the base model and two LoRAs is three different prefixes."""
    index = PreciseIndex()
    for lora in ("", "lora-a", "lora-b"):
        message = next(m for m in captured("mini_fixture.jsonl") if m["scenario"] == f"lora:{lora or 'tiny'}")
        assert lookup(index, tokens_stored(message), lora=lora) == {}
        apply(index, message)
        assert lookup(index, tokens_stored(message), lora=lora) == {A: PreciseMatch(32, (), 0)}


def test_data_parallel_ranks_of_a_real_server() -> None:
    """Each rank's blocks are its own; a prompt both hold is found on the first."""
    index = PreciseIndex()
    messages = [m for m in captured("mini_fixture.jsonl") if m["scenario"].startswith("dp")]
    for message in messages:
        apply(index, message)
    by_scenario = {m["scenario"]: tokens_stored(m) for m in messages}
    assert lookup(index, by_scenario["dp:1"])[A] == PreciseMatch(32, (), 1)
    assert lookup(index, by_scenario["dp:2"])[A] == PreciseMatch(32, (), 0)
    assert lookup(index, by_scenario["dp-pinned:1"])[A] == PreciseMatch(32, (), 0)


@pytest.mark.parametrize("version", ["0.11.0", "0.22.1", "0.24.0"])
def test_older_encodings(version: str) -> None:
    """Three blocks filled one by one are found whatever the version leaves out; one without its parent is not."""
    index = PreciseIndex()
    grown = array("I")
    for message in captured(f"oldfmt_{version}.jsonl"):
        apply(index, message)
        if message["scenario"] == "decode_growth":
            grown += tokens_stored(message)
    assert lookup(index, grown) == {A: PreciseMatch(96, (), 0)}
    assert (index.counts.orphaned, index.counts.malformed) == (1, 0)
