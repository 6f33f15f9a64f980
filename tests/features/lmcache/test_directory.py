"""Placements of chunks become contiguous prefixes."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvproxy.base.types import Tier
from kvproxy.cache.store import EVERY_INSTANCE, Holder
from kvproxy.features.lmcache.coordinator import Directory, WireDirectory, directory_of
from tests.support.examples import examples

Place = tuple[str, str, bool]  # instance, tier, shared


def answer(
    *chunks: list[Place] | list[list[Place]], ranks: int = 1, token_ids: list[int] | None = None
) -> dict[str, Any]:
    """Return the wire form: each chunk's placements, or for several ranks a list of placements per rank."""
    results = []
    for number, chunk in enumerate(chunks):
        for rank, places in enumerate(chunk if ranks > 1 else [chunk]):
            placements = [
                {"instance_id": name, "incarnation": 0, "tier": tier, "backend": "b", "size_bytes": 1, "shared": shared}
                for name, tier, shared in places  # type: ignore[misc]
            ]
            key = {"chunk_hash_hex": f"{number:04x}", "model_name": "m", "kv_rank": rank}
            results.append({"key": key, "placements": placements, "token_ids": token_ids or [], "access_count": 0})
    return {"chunks": len(chunks), "results": results}


def looked_up(wire: dict[str, Any], *, prompt_tokens: int | None = None) -> Directory:
    decoded = msgspec.json.decode(msgspec.json.encode(wire), type=WireDirectory)
    return directory_of(decoded, prompt_tokens=prompt_tokens or wire["chunks"] * 256 + 10)


def held(name: str, host: int, *, disk: int = 0, shared: int = 0) -> Holder:
    """Return a holder of so many tokens by tier."""
    by_tier = ((Tier.HOST, host), (Tier.DISK, disk), (Tier.SHARED, shared))
    lower = tuple([(tier, tokens) for tier, tokens in by_tier if tokens]) if disk or shared else ()
    return Holder(name, host + disk + shared, True, lower)


def l1(name: str) -> Place:
    return (name, "l1", False)


def test_all_holders_and_their_contiguous_prefixes() -> None:
    """The run recorded with two real servers: A on mp-1, its beginning on mp-2 as well."""
    both = [l1("mp-1"), l1("mp-2")]
    found = looked_up(answer(both, both, [l1("mp-1")], [l1("mp-1")]))
    assert set(found.holders) == {held("mp-1", 1024), held("mp-2", 512)}
    assert (found.chunks, found.chunk_tokens) == (4, 256)


def test_a_hole_ends_the_prefix() -> None:
    """Chunks after a missing one are of no use; an instance without the first has nothing."""
    found = looked_up(answer([l1("a")], [l1("b")], [l1("a"), l1("b")]))
    assert found.holders == [held("a", 256)]


def test_lower_tiers_extend_the_prefix() -> None:
    """L1 counts alone and with the instance's own L2."""
    found = looked_up(answer([l1("a")], [("a", "l2", False)], [l1("a")]))
    assert found.holders == [held("a", 512, disk=256)]


def test_a_shared_pool_serves_everyone() -> None:
    """Whichever instance reported it: any instance can load from it."""
    pool: Place = ("b", "l2", True)
    found = looked_up(answer([l1("a"), pool], [pool], [l1("a")]))
    assert found.holders == [held("a", 512, shared=256), held(EVERY_INSTANCE, 0, shared=512)]


def test_every_rank_must_hold_the_chunk() -> None:
    """Half a tensor-parallel chunk cannot be loaded."""
    found = looked_up(answer([[l1("a")], [l1("a")]], [[l1("a")], [l1("b")]], ranks=2))
    assert found.holders == [held("a", 256)]


def test_nothing_known() -> None:
    """Unknown keys come back with no placements; a prompt under one chunk with no result."""
    assert looked_up(answer([], [])).holders == []
    assert looked_up(answer(), prompt_tokens=10) == Directory(0, 256, [])


def test_the_chunk_size_is_read_off_the_answer() -> None:
    """From a known chunk's ids; else from how many whole chunks the prompt has; 256 where that fits."""
    told = answer([], [l1("a")], token_ids=list(range(64)))
    assert looked_up(told, prompt_tokens=130).chunk_tokens == 64
    assert looked_up(answer([], []), prompt_tokens=600).chunk_tokens == 256
    assert looked_up(answer([], []), prompt_tokens=300).chunk_tokens == 128
    assert looked_up(answer(*[[]] * 10), prompt_tokens=505).chunk_tokens == 50
    assert looked_up(answer([]), prompt_tokens=1).chunk_tokens == 1


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.sets(st.tuples(st.sampled_from("abc"), st.sampled_from(["l1", "l2"]), st.booleans())), max_size=8))
def test_prefixes_agree_with_a_naive_walk(chunks: list[set[Place]]) -> None:
    """For any placements: walk each instance's chunks from the start until one is missing."""
    found = looked_up(answer(*[sorted(chunk) for chunk in chunks]))
    by_name = {one.instance_id: one for one in found.holders}
    for name in "abc":
        there = [any(shared or who == name for who, _, shared in chunk) for chunk in chunks]
        count = [*there, False].index(False)
        owns = any(who == name and not shared for chunk in chunks for who, _, shared in chunk)
        leading = chunks[:count]
        far = [chunk for chunk in leading if (name, "l1", False) not in chunk]
        disk = sum((name, "l2", False) in chunk for chunk in far)
        near = count - len(far)
        expected = held(name, near * 256, disk=disk * 256, shared=(len(far) - disk) * 256) if owns and count else None
        assert by_name.get(name) == expected
