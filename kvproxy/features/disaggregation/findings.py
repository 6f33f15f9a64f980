"""Pairs that are out, for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvproxy.cluster.cluster import Cluster
from kvproxy.features.disaggregation.pairs import OUT, PairState
from kvproxy.features.disaggregation.watch import find_all
from kvproxy.operate.admin.findings import Rank, Trouble

FIXES = {
    PairState.WRONG: "compare the engines' models, dtypes and flags; restart both to examine them again",
    PairState.NO_EFFECT: "start both with the connector (vLLM: --kv-transfer-config); kvproxy doctor shows more",
    PairState.VERSIONS: "give both engines one version",
    PairState.MODES: "set `role` of each endpoint as its server's --disaggregation-mode",
}


def find_pairs_out(clusters: Mapping[str, Cluster]) -> Iterator[Trouble]:
    """Yield a trouble for each pair that carries no requests by what its canary found."""
    for state in find_all(clusters.values()):
        for pair in state.pairs:
            if pair.state in OUT:
                where = f"clusters.{state.cluster.name}"
                what = f"prefill at {pair.prefill.id} for {pair.decode.id} is off: {pair.why}"
                key = ("disaggregation", where, str(pair.prefill.id), str(pair.decode.id))
                yield Trouble(key, Rank.REST, "problem", where, what, FIXES[pair.state])
