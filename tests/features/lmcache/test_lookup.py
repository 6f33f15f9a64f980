"""The value of the lookup service's answers."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

import pytest

from kvproxy.base.errors import BreakerOpen
from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.settings.model import BreakerSettings
from kvproxy.base.types import EndpointId, Tier
from kvproxy.cache.breakers import OperationBreakers
from kvproxy.cache.overlap.denied import DeniedPlacements
from kvproxy.cache.store import EVERY_INSTANCE, ActionKind, Holder, Prefix, TierMemory
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.routing.policy import Overlap
from kvproxy.features.lmcache.lookups import LookupClient
from kvproxy.features.lmcache.provider import CONTROLLER, Effect
from tests.cache.support import NOWHERE, A, B, cluster_of, tokens
from tests.support.clock import FakeClock

HASHES = array("Q", [11, 12, 13, 14])


class Answering:
    """A provider that answers lookups with what it was given."""

    source = CONTROLLER
    supports: frozenset[ActionKind] = frozenset()

    def __init__(self, *holders: Holder) -> None:
        self.holders = holders

    async def lookup(self, prefix: Prefix) -> Sequence[Holder]:
        return self.holders

    async def act(self, kind: ActionKind, instance_id: str, prefix: Prefix, *, source: str = "") -> Effect:
        return Effect(0)

    async def instances(self) -> frozenset[str]:
        return frozenset()

    async def indexed_chunks(self) -> int:
        return 0

    async def memory(self) -> Sequence[TierMemory]:
        return ()


def lookups(clock: FakeClock, metrics: Metrics | None = None) -> LookupClient:
    metrics = metrics or Metrics()
    under_test = LookupClient(
        breakers=OperationBreakers(BreakerSettings(), clock=clock, metrics=metrics),
        metrics=metrics,
        clock=clock,
    )
    under_test.provider = Answering()
    return under_test


def worth(
    under_test: LookupClient,
    cluster: Cluster,
    *holders: Holder,
    local: Mapping[EndpointId, Overlap] | None = None,
    denied: DeniedPlacements | None = None,
) -> dict[EndpointId, int]:
    """Tokens by endpoint that these holders stand for."""
    known = frozenset(endpoint.instance_id for endpoint in cluster.endpoints)
    claims = under_test.count_overlaps(
        holders,
        endpoints=cluster.endpoints,
        known=known,
        local=local or {},
        hashes=HASHES,
        denied=DeniedPlacements(FakeClock()) if denied is None else denied,
    )
    return {claim.endpoint: claim.tokens for claim in claims}


def test_instances_are_mapped_by_id_not_by_address(clock: FakeClock) -> None:
    """Two instances on one host are two endpoints."""
    cluster = cluster_of(
        {"a": "http://127.0.0.1:8001", "b": "http://127.0.0.1:8002"}, instances={"a": "vllm-0", "b": "vllm-1"}
    )
    found = worth(lookups(clock), cluster, Holder("vllm-0", 256, True), Holder("vllm-1", 512, True))
    assert found == {A: 256, B: 512}


def test_an_empty_layout_claims_nothing(clock: FakeClock) -> None:
    assert worth(lookups(clock), cluster_of({"a": NOWHERE})) == {}


def test_zero_tokens_claim_nothing(clock: FakeClock) -> None:
    assert worth(lookups(clock), cluster_of({"a": NOWHERE}), Holder("a", 0, True)) == {}


def test_an_unknown_instance_is_counted_and_told_of_once(clock: FakeClock, caplog: pytest.LogCaptureFixture) -> None:
    """The usual cause of a preference that never comes: the ids differ. The line says which there are."""
    metrics = Metrics()
    under_test, cluster = lookups(clock, metrics), cluster_of({"a": NOWHERE, "b": NOWHERE})
    for _ in range(3):
        assert worth(under_test, cluster, Holder("lmcache_default_instance", 512, True)) == {}
    assert metrics.registry.get_sample_value("kvproxy_kvcache_unknown_instances_total") == 3
    assert caplog.text.count("'lmcache_default_instance'") == 1
    assert "known: a, b" in caplog.text


def test_a_strange_service_cannot_fill_the_memory_with_names(
    clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    under_test, cluster = lookups(clock), cluster_of({"a": NOWHERE})
    for number in range(1000):
        worth(under_test, cluster, Holder(f"instance{number}", 512, True))
    assert len(caplog.records) == 256


def test_a_holder_that_serves_another_model_is_passed_over_in_silence(
    clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    """The controller's index knows no models: the same tokens mean another prefix there."""
    under_test, cluster = lookups(clock), cluster_of({"a": NOWHERE, "b": NOWHERE})
    claims = under_test.count_overlaps(
        [Holder("b", 512, True)],
        endpoints=[endpoint for endpoint in cluster.endpoints if endpoint.id == A],
        known={"a", "b"},
        local={},
        hashes=HASHES,
        denied=DeniedPlacements(clock),
    )
    assert claims == []
    assert not caplog.records


def test_a_lookup_end_beyond_the_contiguous_prefix_is_capped_by_what_was_routed(clock: FakeClock) -> None:
    """`{"b": 256, "a": 1024}` says where a's last chunk ends, not that it has the ones before."""
    holders = (Holder("b", 256, False), Holder("a", 1024, False))
    cluster = cluster_of({"a": NOWHERE, "b": NOWHERE})
    assert worth(lookups(clock), cluster, *holders, local={A: Overlap(300)}) == {A: 300, B: 256}


def test_without_any_own_knowledge_a_hint_stands(clock: FakeClock) -> None:
    """The prefix may have come another way: another proxy, a warmed engine."""
    cluster = cluster_of({"a": NOWHERE, "b": NOWHERE})
    assert worth(lookups(clock), cluster, Holder("b", 256, False), Holder("a", 1024, False)) == {A: 1024, B: 256}


def test_a_hint_the_engine_contradicted_is_not_believed_again(clock: FakeClock) -> None:
    """Until it has had time to come true."""
    under_test, cluster = lookups(clock), cluster_of({"a": NOWHERE, "b": NOWHERE})
    holders = (Holder("b", 256, False), Holder("a", 1024, False))
    denied = DeniedPlacements(clock)
    denied.note_denial(A, HASHES, 0)
    assert worth(under_test, cluster, *holders, denied=denied) == {A: 0, B: 256}
    clock.advance(61)
    assert worth(under_test, cluster, *holders, denied=denied)[A] == 1024


def test_a_sole_holder_is_not_capped(clock: FakeClock) -> None:
    """The search ends at the first chunk no instance holds: an instance named alone has them all."""
    cluster = cluster_of({"a": NOWHERE})
    assert worth(lookups(clock), cluster, Holder("a", 1024, True), local={A: Overlap(300)}) == {A: 1024}


def test_a_prompt_without_a_block_cannot_be_distrusted(clock: FakeClock) -> None:
    denied = DeniedPlacements(clock)
    denied.note_denial(A, array("Q"), 0)
    claims = lookups(clock).count_overlaps(
        [Holder("a", 512, False)],
        endpoints=cluster_of({"a": NOWHERE}).endpoints,
        known={"a"},
        local={},
        hashes=array("Q"),
        denied=denied,
    )
    assert [claim.tokens for claim in claims] == [512]


async def test_hits_are_remembered(clock: FakeClock) -> None:
    """Whether lookups ever named a holder decides what an empty one means."""
    under_test = lookups(clock)
    under_test.provider = Answering(Holder("a", 0, True))
    await under_test.find_holders(Prefix(tokens(10), "m"))
    assert under_test.hits == 0
    under_test.provider = Answering(Holder("a", 256, True))
    await under_test.find_holders(Prefix(tokens(10), "m"))
    assert under_test.hits == 1


async def test_without_a_service_nobody_is_asked(clock: FakeClock) -> None:
    under_test = lookups(clock)
    under_test.provider = None
    assert not under_test.possible
    with pytest.raises(BreakerOpen):
        await under_test.find_holders(Prefix(tokens(10), "m"))


def test_a_shared_store_counts_for_every_engine_that_reads_it(clock: FakeClock) -> None:
    """Whichever instance reported it, and whether the engine has any of its own."""
    cluster = cluster_of({"a": NOWHERE, "b": NOWHERE})
    next(one for one in cluster.endpoints if one.id == B).reads_shared_kv = False
    shared = Holder(EVERY_INSTANCE, 512, True, ((Tier.SHARED, 512),))
    assert worth(lookups(clock), cluster, shared) == {A: 512}
    own = Holder("b", 768, True, ((Tier.HOST, 256), (Tier.SHARED, 512)))
    assert worth(lookups(clock), cluster, own) == {B: 256}


def test_a_stale_placement_that_an_engine_denied_is_dropped_for_a_while(clock: FakeClock) -> None:
    """In a shared store for every engine, on a disk for that one; what is nearer, and other prompts, stay."""
    under_test, cluster = lookups(clock), cluster_of({"a": NOWHERE, "b": NOWHERE})
    shared = Holder(EVERY_INSTANCE, 1024, True, ((Tier.SHARED, 1024),))
    disk = [Holder(name, 1024, True, ((Tier.HOST, 512), (Tier.DISK, 512))) for name in ("a", "b")]
    denied = DeniedPlacements(clock)
    denied.note_denial(A, HASHES, 256, cached_blocks=0, lower=((Tier.SHARED, 1024),))
    assert worth(under_test, cluster, shared, denied=denied) == {A: 256, B: 256}
    assert worth(under_test, cluster, *disk, denied=denied) == {A: 1024, B: 1024}
    denied.note_denial(A, HASHES, 256, cached_blocks=0, lower=((Tier.HOST, 512), (Tier.DISK, 512)))
    assert worth(under_test, cluster, *disk, denied=denied) == {A: 512, B: 1024}
    clock.advance(61.0)
    assert worth(under_test, cluster, shared, *disk, denied=denied) == {A: 1024, B: 1024}
