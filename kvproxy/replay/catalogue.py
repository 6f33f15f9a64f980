"""Scenarios by name: a workload, the load it is played at, and what is wrong with the fleet or with what is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from types import MappingProxyType
from typing import Any

from kvproxy.config.fields import spelling_hint
from kvproxy.errors import KvproxyError
from kvproxy.replay import workloads
from kvproxy.replay.settings import ReplayFleet
from kvproxy.replay.trace import Half, Trace

#: What a workload is drawn with: constants tuned on one draw are reported on another.
_SEEDS = {Half.TUNING: 2, Half.REPORT: 1, Half.BOTH: 1}


class UnknownScenario(KvproxyError):
    """No scenario of this name."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """`changes` are to fields of the fleet. Where those are the point, `any_trace` is true: a trace can take the place
    of the workload."""

    name: str
    what: str
    workload: workloads.Workload
    load: float
    changes: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    any_trace: bool = False

    def draw(self, half: Half) -> Trace:
        """The workload, of one seed for either half."""
        seed = _SEEDS[half]
        return replace(self.workload(Random(seed)), name=self.name, half=half)

    def disturb(self, fleet: ReplayFleet) -> ReplayFleet:
        """The fleet as the scenario has it."""
        return replace(fleet, **self.changes)


def _disturbed(name: str, what: str, load: float, **changes: Any) -> Scenario:
    return Scenario(name, what, workloads.draw_assistants, load, changes, any_trace=True)


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("herd", "256 requests at once on one system prompt of 8k tokens", workloads.draw_herd, 0.85),
        Scenario("unique", "prompts that share nothing", workloads.draw_unique, 0.8),
        Scenario("bimodal", "prompts of 100 tokens, one in twenty of 100k", workloads.draw_bimodal, 0.7),
        Scenario("decode_bound", "short prompts, long answers", workloads.draw_decodes, 0.85),
        Scenario("decode_memory", "the same, caches of 131k tokens: memory is full", workloads.draw_decodes, 0.95,
                 {"capacity_tokens": 131_072}),
        Scenario("chats", "chats as in ShareGPT: short prompts, longer answers", workloads.draw_chats, 0.9),
        Scenario("hot_set", "200 documents of 20k tokens, by Zipf's law", workloads.draw_hot_set, 0.85),
        Scenario("hot_set_flips", "the same, other documents from half-way on",
                 partial(workloads.draw_hot_set, flips=True), 0.85),
        Scenario("hot_prompt", "seven in ten requests begin with the same 8k tokens", workloads.draw_hot_prompt, 0.85),
        Scenario("burst", "ten times the chats for a thirtieth of the run", workloads.draw_burst, 0.45),
        Scenario("agents", "agents with pauses of 5 to 60 s, a third of them fork", workloads.draw_agents, 0.6),
        Scenario("greedy_tenant", "one tenant sends 20k-token prompts beside the others' chats",
                 workloads.draw_greedy, 0.85),
        _disturbed("engine_added", "an eighth engine comes, cold, half-way", 0.8, joins=((7, 0.5),)),
        _disturbed("engine_removed", "one of eight engines goes half-way", 0.75, leaves=((7, 0.5),)),
        _disturbed("slow_half", "half of eight engines at 0.4 of the speed", 0.55, slowness=(2.5,) * 4),
        _disturbed("false_20", "20 % of the index's entries are false", 0.7, wrong_share=0.2),
        _disturbed("false_50", "half of the index's entries are false", 0.7, wrong_share=0.5),
        _disturbed("reports_nothing", "engines report 0 cached tokens", 0.7, reports_cached=False),
        _disturbed("small_cache", "caches of an eighth", 0.5, capacity_tokens=ReplayFleet().capacity_tokens // 8),
    )
}  # fmt: skip


def find_scenarios(names: str) -> Sequence[Scenario]:
    """By their names, with commas between them."""
    wanted = [name.strip() for name in names.split(",")]
    for name in wanted:
        if name not in SCENARIOS:
            raise UnknownScenario(f"no scenario {name!r} ({spelling_hint(name, SCENARIOS)}); --scenario list has all")
    return [SCENARIOS[name] for name in wanted]


def list_scenarios() -> str:
    """Each with its load and what it is."""
    width = max(map(len, SCENARIOS))
    return "\n".join(f"{each.name:<{width}}  load {each.load:<4g}  {each.what}" for each in SCENARIOS.values())
