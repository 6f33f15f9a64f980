"""The data-parallel ranks of an engine: which there are, and whether a request may ask for one."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kvproxy.doctor.checks.trial import TRIAL_CALLS
from kvproxy.doctor.engine import EngineCheck
from kvproxy.doctor.ranks import MAX_TRIED, RankAnswers
from kvproxy.doctor.report import Finding, ok, problem, warning

_STATE = "set `data_parallel: {ranks: [%s]}` of the endpoint"
_DO_NOT_STEER = "update the engine, or set `data_parallel: {steer: false}`"


@dataclass(frozen=True, slots=True)
class RanksCheck(EngineCheck):
    """A request to each rank, and to one that there is not."""

    name = "data-parallel ranks"
    calls = TRIAL_CALLS + MAX_TRIED

    async def collect_findings(self) -> Sequence[Finding]:
        engine, shown = self.engine, await self.engine.shown_ranks()
        if not engine.data_parallel.steer:
            return [ok(self.where, f"balances over its {len(shown)} data-parallel ranks by itself")] if shown else []
        answers = await engine.try_ranks()
        if answers is None:
            return []
        named = {source.dp_rank for source in await engine.sources_or_none()}
        return [judge_ranks(self.where, answers, stated=engine.data_parallel.ranks, shown=shown, named=named)]


def judge_ranks(
    where: str, answers: RankAnswers, *, stated: Sequence[int], shown: Sequence[int], named: Collection[int]
) -> Finding:
    """The verdict: `stated` by the configuration, `shown` by metrics, `named` by event sources."""
    taken = _listed(sorted(answers.taken))
    if answers.refused:
        fix = _STATE % taken if taken else "set `data_parallel: {steer: false}`: it knows none"
        return problem(where, f"has no data-parallel rank {_listed(answers.refused)}, which is configured", fix)
    if not answers.reads:
        what = "answers a request for a data-parallel rank that there is not: it does not read x-data-parallel-rank"
        return warning(where, what, _DO_NOT_STEER)
    if stated and set(shown) - set(stated):
        what = f"has the data-parallel ranks {_listed(shown)}, and the configuration names {_listed(sorted(stated))}"
        return warning(where, f"{what}: the others get no requests", _STATE % _listed(shown))
    if not stated and set(named) != set(shown):
        what = f"only its metrics say that it has the data-parallel ranks {taken}: a prefix is computed once a rank"
        return warning(where, what, f"{_STATE % taken}, or start it with `--kv-events-config`")
    return ok(where, f"takes requests for each of its data-parallel ranks {taken}, and for no other one")


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
