"""Scenarios by name: a workload, the load it is played at, and what is wrong with the fleet or with what is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random

from kvproxy.base.errors import KvproxyError
from kvproxy.lab.replay import workloads
from kvproxy.lab.replay.settings import ReplayFleet
from kvproxy.lab.replay.trace import Half, Trace
from kvproxy.operate.config.decode import spelling_hint

#: Seeds of a workload: constants tuned on one draw are reported on another.
_SEEDS = {Half.TUNING: 2, Half.REPORT: 1, Half.BOTH: 1}


class UnknownScenario(KvproxyError):
    """No scenario of this name."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """Where what is wrong with the fleet is the point, `any_trace` is true: a trace can take the workload's place."""

    name: str
    what: str
    load: float
    workload: workloads.Workload
    disturb: Callable[[ReplayFleet], ReplayFleet] = lambda fleet: fleet
    any_trace: bool = False

    def draw(self, half: Half) -> Trace:
        """Return the workload, of one seed for either half."""
        return replace(self.workload(Random(_SEEDS[half])), name=self.name, half=half)


def _disturbed(name: str, what: str, load: float, disturb: Callable[[ReplayFleet], ReplayFleet]) -> Scenario:
    return Scenario(name, what, load, workloads.draw_assistants, disturb, any_trace=True)


def _small_memory(fleet: ReplayFleet) -> ReplayFleet:
    return replace(fleet, capacity_tokens=131_072)


def _quarter(fleet: ReplayFleet) -> ReplayFleet:
    return replace(fleet, capacity_tokens=fleet.capacity_tokens // 4)


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("herd", "256 requests at once on one system prompt of 8k tokens", 0.85, workloads.draw_herd),
        Scenario("unique", "prompts that share nothing", 0.8, workloads.draw_unique),
        Scenario("bimodal", "prompts of 100 tokens, one in twenty of 100k", 0.7, workloads.draw_bimodal),
        Scenario("decode_bound", "short prompts, long answers", 0.85, workloads.draw_decodes),
        Scenario(
            "decode_memory",
            "the same with caches of 131k tokens: memory is full",
            1.1,
            workloads.draw_decodes,
            _small_memory,
        ),
        Scenario("chats", "chats as in ShareGPT: short prompts, longer answers", 0.9, workloads.draw_chats),
        Scenario(
            "short_chats",
            "chats of 760 tokens in and 310 out on engines with 64 decode slots",
            0.9,
            workloads.draw_short_chats,
            lambda fleet: replace(fleet, max_sequences=64),
        ),
        Scenario("essays", "short prompts, answers of 6,000 to 20,000 tokens", 0.9, workloads.draw_essays),
        Scenario("giants", "prompts of 200k tokens among chats", 0.7, workloads.draw_giants),
        Scenario(
            "flash_crowd",
            "600 questions on one document of 61k tokens within a tenth of the run",
            0.6,
            workloads.draw_flash_crowd,
        ),
        Scenario("hot_set", "200 documents of 20k tokens, by Zipf's law", 0.85, workloads.draw_hot_set),
        Scenario(
            "hot_set_flips",
            "the same, other documents from half-way on",
            0.85,
            partial(workloads.draw_hot_set, flips=True),
        ),
        Scenario("hot_prompt", "half of the requests begin with the same 30k tokens", 0.6, workloads.draw_hot_prompt),
        Scenario("burst", "ten times the chats for a thirtieth of the run", 0.45, workloads.draw_burst),
        Scenario("agents", "agents with pauses of 5 to 60 s, a third of them fork", 0.6, workloads.draw_agents),
        Scenario("greedy_tenant", "a tenant sends 20k-token prompts beside others' chats", 0.85, workloads.draw_greedy),
        _disturbed(
            "engine_added",
            "the last engine comes half-way, cold",
            0.8,
            lambda fleet: replace(fleet, joins=((fleet.instances - 1, 0.5),)),
        ),
        _disturbed(
            "engine_removed",
            "the last engine goes half-way",
            0.75,
            lambda fleet: replace(fleet, leaves=((fleet.instances - 1, 0.5),)),
        ),
        _disturbed(
            "slow_half",
            "half of the engines have 0.4 of the speed",
            0.55,
            lambda fleet: replace(fleet, slowness=(2.5,) * (fleet.instances // 2)),
        ),
        _disturbed(
            "false_20", "20 % of the index's entries are false", 0.7, lambda fleet: replace(fleet, wrong_share=0.2)
        ),
        _disturbed(
            "false_50", "half of the index's entries are false", 0.7, lambda fleet: replace(fleet, wrong_share=0.5)
        ),
        _disturbed(
            "reports_nothing", "engines report 0 cached tokens", 0.7, lambda fleet: replace(fleet, reports_cached=False)
        ),
        _disturbed(
            "small_cache",
            "caches of an eighth",
            0.5,
            lambda fleet: replace(fleet, capacity_tokens=fleet.capacity_tokens // 8),
        ),
        _disturbed("quarter_cache", "a quarter of the cache, tools", 0.7, _quarter),
        Scenario("quarter_chats", "the same with long conversations", 0.7, workloads.draw_conversations, _quarter),
    )
}


def find_scenarios(names: str) -> Sequence[Scenario]:
    """By their names, with commas between them."""
    wanted = [name.strip() for name in names.split(",")]
    for name in wanted:
        if name not in SCENARIOS:
            raise UnknownScenario(f"no scenario {name!r} ({spelling_hint(name, SCENARIOS)})")
    return [SCENARIOS[name] for name in wanted]


def list_scenarios() -> str:
    """Each with its load and what it is."""
    width = max(map(len, SCENARIOS))
    return "\n".join(f"{each.name:<{width}}  load {each.load:<4g}  {each.what}" for each in SCENARIOS.values())
