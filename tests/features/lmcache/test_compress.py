"""Cold prefixes are compressed under load, remembered, and decompressed when they are wanted."""

from __future__ import annotations

import pytest

from kvproxy.cache.actions.hotness import Hotness
from kvproxy.cache.store import ActionKind
from kvproxy.features.lmcache import strategies
from kvproxy.features.lmcache.cold_prefixes import ColdPrefixes
from kvproxy.features.lmcache.pressure import Pressure
from kvproxy.features.lmcache.strategies import Compress
from tests.features.lmcache.support import BUSY, CALM, UNKNOWN, everywhere, hotness, serve, strategy


def compressing(known: Hotness, **changes: object) -> Compress:
    settings = strategy(**changes)
    return Compress(settings, ColdPrefixes(settings, known, {}))


def test_nothing_below_the_threshold_or_without_a_signal() -> None:
    known = hotness()
    serve(known, 1)
    compress = compressing(known, load_threshold=0.8)
    served = serve(known, 2)
    for pressure in (CALM, UNKNOWN, Pressure(load=0.79)):
        assert compress.plan(served, everywhere(pressure), set(), 0.0) == []
    assert len(compress.plan(served, everywhere(Pressure(load=0.8)), {served.prefixes[0].head}, 0.0)) == 1


def test_only_what_is_cold() -> None:
    """Neither hot prefixes nor what was just served."""
    known = hotness()
    serve(known, 1, times=2)
    serve(known, 2)
    served = serve(known, 3)
    actions = compressing(known).plan(served, everywhere(BUSY), {served.prefixes[0].head}, 0.0)
    assert [(one.kind, one.prefix.key) for one in actions if one.prefix] == [(ActionKind.COMPRESS, 2)]


def test_prefixes_shared_with_one_in_use_are_left_alone() -> None:
    """Cache entries are shared: compressing a cold chat would compress the system prompt of a hot one."""
    known = hotness()
    shared = serve(known, 5).prefixes[0].tokens
    cold = serve(known, 1, of=shared + shared)
    served = serve(known, 2, of=shared)
    assert cold.prefixes[0].head == served.prefixes[0].head
    assert compressing(known).plan(served, everywhere(BUSY), {served.prefixes[0].head}, 0.0) == []


def test_the_same_prefix_is_not_compressed_twice() -> None:
    known = hotness()
    serve(known, 1)
    served = serve(known, 2)
    compress = compressing(known)
    (action,) = compress.plan(served, everywhere(BUSY), {served.prefixes[0].head}, 0.0)
    compress.done(action, 0.0)
    assert compress.plan(served, everywhere(BUSY), {served.prefixes[0].head}, 0.0) == []


def test_compressed_prefixes_are_decompressed_before_use() -> None:
    known = hotness()
    serve(known, 1)
    served = serve(known, 2)
    compress = compressing(known)
    (action,) = compress.plan(served, everywhere(BUSY), {served.prefixes[0].head}, 0.0)
    compress.done(action, 0.0)
    assert compress.plan_undoing([1, 7], "b") == []
    (undo,) = compress.plan_undoing([1, 7], "a")
    assert undo.kind is ActionKind.DECOMPRESS
    compress.done(undo, 1.0)
    assert compress.plan_undoing([1, 7], "a") == []


def test_a_configured_instance_is_asked_for_its_own_load() -> None:
    known = hotness()
    serve(known, 1, instance="vllm-b")
    served = serve(known, 2, instance="a")
    compress = compressing(known, compress_instance_id="vllm-b")
    (action,) = compress.plan(served, lambda name: BUSY if name == "vllm-b" else CALM, set(), 0.0)
    assert action.instance_id == "vllm-b"


def test_of_a_very_long_chat_the_ends_are_looked_up() -> None:
    """A compressed earlier turn is near the end, a compressed system prompt at the beginning."""
    known = hotness()
    serve(known, 1)
    served = serve(known, 2)
    compress = compressing(known)
    (action,) = compress.plan(served, everywhere(BUSY), {served.prefixes[0].head}, 0.0)
    compress.done(action, 0.0)
    many = list(range(10, 5000))
    assert len(compress.plan_undoing([1, *many], "a")) == 1
    assert len(compress.plan_undoing([*many, 1, 7], "a")) == 1
    assert len(compress.plan_undoing([*many, 1, *many], "a")) == 0


def test_short_prefixes_are_not_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """512 tokens here."""
    known = hotness()
    serve(known, 1)
    served = serve(known, 2)
    for least, found in ((513, 0), (512, 1)):
        monkeypatch.setattr(strategies, "COMPRESS_MIN_TOKENS", least)
        compress = compressing(known)
        assert len(compress.plan(served, everywhere(BUSY), {served.prefixes[0].head}, 0.0)) == found
