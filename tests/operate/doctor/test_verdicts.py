"""The verdicts that need no cluster: facts in, findings out."""

from __future__ import annotations

import pytest

from kvproxy.base.errors import ClientError, ClientTimeout, NotSupported, Problem
from kvproxy.cache.clients.engine_metrics import CacheConfig, EngineMetrics
from kvproxy.cache.clients.event_sources import KvEventSource
from kvproxy.operate.doctor.check_configuration import convert_problems
from kvproxy.operate.doctor.check_models import may_be_one
from kvproxy.operate.doctor.check_trial import judge_caching, judge_tokenize
from kvproxy.operate.doctor.engine import Counters, PromptLengths, parse_counters, parse_prompt_lengths
from kvproxy.operate.doctor.report import Severity
from kvproxy.operate.doctor.trial import Trial, TrialPlan, TrialReply, count_words

SOURCE = KvEventSource(0, "tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558")


def metrics(*, caching: bool | None = None, hits: int | None = None, block: int | None = 16) -> EngineMetrics:
    """Return an engine's metrics of its cache."""
    return EngineMetrics(prefix_hits_tokens=hits, cache=CacheConfig(block, 512, 8192, caching, 1))


def trial(
    *,
    cached: int | None = 32,
    before: EngineMetrics | None = None,
    after: EngineMetrics | None = None,
    tokenized: tuple[int, ...] | ClientError = tuple(range(40)),
    ids: tuple[int, ...] = tuple(range(40)),
    longer: TrialReply | None = None,
) -> Trial:
    """Return a prompt of 40 tokens, sent twice, and perhaps a longer one."""
    first, second = TrialReply(40, 0, ids), TrialReply(40, cached)
    return Trial("m", True, tokenized, first, second, longer, 0.001, before, after)


ON, OFF, UNKNOWN = metrics(caching=True, hits=0), metrics(caching=False, hits=0), metrics(hits=0)


@pytest.mark.parametrize(
    ("seen", "severity", "said"),
    [
        (trial(cached=32), Severity.OK, "32 of 40 prompt tokens"),
        (
            trial(cached=32, after=metrics(caching=True, block=528)),
            Severity.OK,
            "the second time; it reuses in steps of 528 tokens; prompts under 528 never hit",
        ),
        (
            trial(cached=0, after=ON, longer=TrialReply(4112, 4096)),
            Severity.OK,
            "4096 of 4112 prompt tokens sent twice came from its cache, and none of 40; the proxy learns the step",
        ),
        (
            trial(cached=0, after=metrics(caching=True, block=4096), longer=TrialReply(4112, 4096)),
            Severity.OK,
            "none of 40; it reuses in steps of 4,096 tokens; prompts under 4,096 never hit",
        ),
        (trial(cached=0, before=ON, after=ON, longer=TrialReply(4112, 0)), Severity.WARNING, "computed twice"),
        (trial(cached=0, before=OFF, after=OFF), Severity.PROBLEM, "prefix caching is off"),
        (trial(cached=None, before=OFF, after=OFF), Severity.PROBLEM, "prefix caching is off"),
        (trial(cached=0), Severity.PROBLEM, "prefix caching is off"),
        (trial(cached=0, before=UNKNOWN, after=UNKNOWN), Severity.PROBLEM, "prefix caching is off"),
        (trial(cached=0, before=ON, after=ON), Severity.WARNING, "was computed twice"),
        (trial(cached=None, before=ON, after=metrics(caching=True, hits=32)), Severity.WARNING, "caching works"),
        (trial(cached=None, before=ON, after=ON), Severity.WARNING, "no reuse was seen"),
        (trial(cached=None, before=UNKNOWN, after=metrics(hits=32)), Severity.WARNING, "caching works"),
        (trial(cached=None, before=UNKNOWN, after=UNKNOWN), Severity.PROBLEM, "prefix caching is off"),
        (trial(cached=None), Severity.WARNING, "shows no counters"),
    ],
)
def test_caching(seen: Trial, severity: Severity, said: str) -> None:
    """Caching that is off, a flag that is missing and a cache that is too small are told apart."""
    found = judge_caching("endpoint a", seen)
    assert found.severity is severity
    assert said in found.what


@pytest.mark.parametrize(
    ("seen", "needed", "severity", "said"),
    [
        (trial(), True, Severity.OK, "agrees with the engine (40 tokens)"),
        (trial(ids=()), True, Severity.OK, "agrees with the engine"),
        (trial(tokenized=tuple(range(39))), True, Severity.PROBLEM, "makes 39 tokens of a prompt"),
        (trial(tokenized=tuple(range(39))), False, Severity.WARNING, "counts as 40"),
        (trial(tokenized=tuple(range(1, 41))), True, Severity.PROBLEM, "makes other tokens"),
        (trial(tokenized=NotSupported("no route", status=404)), True, Severity.PROBLEM, "has no /tokenize"),
        (trial(tokenized=NotSupported("no route", status=404)), False, Severity.OK, "which nothing needs"),
        (trial(tokenized=ClientTimeout("late")), True, Severity.PROBLEM, "/tokenize fails: late"),
    ],
)
def test_tokenize(seen: Trial, needed: bool, severity: Severity, said: str) -> None:
    """It matters as much as something depends on it."""
    found = judge_tokenize("endpoint a", seen, needed=needed)
    assert found.severity is severity
    assert said in found.what


def test_configuration_problems_keep_their_severity() -> None:
    """Errors, warnings and notes; a hint is the fix; without one there is none."""
    problems = [
        Problem("a", "bad", "do this"),
        Problem("", "doubtful", severity="warning"),
        Problem("c", "so", "", "note"),
    ]
    found = list(convert_problems(problems))
    assert [one.severity for one in found] == [Severity.PROBLEM, Severity.WARNING, Severity.OK]
    assert [one.where for one in found] == ["a", "configuration", "c"]
    assert found[0].fix == "do this"
    assert found[1].fix == ""
    placed = Problem("a", "bad", file="config.yaml", line=3, column=1)
    assert [one.where for one in convert_problems([placed])] == ["config.yaml:3:1: a"]


EXPOSITION = b"""\
# HELP vllm:prompt_tokens_total Prefill tokens.
vllm:prompt_tokens_total{engine="0",model_name="m"} 100.0
vllm:prompt_tokens_total{engine="1",model_name="m"} 20.0
vllm:prompt_tokens_by_source_total{engine="0"} 7.0
vllm:generation_tokens_total 8 1795252968
vllm:time_to_first_token_seconds_sum{engine="0"} 0.25
vllm:request_prompt_tokens_bucket{engine="0",le="200.0"} 3.0
vllm:request_prompt_tokens_bucket{engine="0",le="500.0"} 3.0
vllm:request_prompt_tokens_bucket{engine="0",le="+Inf"} 4.0
vllm:request_prompt_tokens_bucket{engine="1",le="200.0"} 1.0
vllm:request_prompt_tokens_bucket{engine="1",le="+Inf"} 1.0
vllm:request_prompt_tokens_bucket{engine="1",le="500.0"} broken
"""


def test_figures_of_an_exposition() -> None:
    """Summed over ranks; labels and time stamps or not; unreadable lines are passed over."""
    assert parse_counters(EXPOSITION) == Counters((120.0, 8.0, 0.25))
    assert parse_counters(b"vllm:prompt_tokens_total 5\n") is None
    odd = b"".join(
        b'vllm:request_prompt_tokens_bucket{le="%b"} %b\n' % (le, count)
        for le, count in ((b"1e5", b"Inf"), (b"9", b"-1"), (b"7", b"NaN"), (b"1.2.3", b"4"), (b"x", b"5"), (b"2", b"6"))
    )
    assert parse_prompt_lengths(odd) == PromptLengths(6, ((2.0, 6),))
    lengths = parse_prompt_lengths(EXPOSITION)
    assert lengths.count == 5
    assert lengths.share_below(256) == 4 / 5
    assert lengths.share_below(100) == 0.0
    assert PromptLengths(0, ()).share_below(256) == 0.0


def test_the_same_growing_figures() -> None:
    """Two readings that overlap in every figure are one engine's, idle or busy."""
    idle = Counters((1.0, 2.0)), Counters((1.0, 2.0))
    busy = Counters((1.0, 1.5)), Counters((3.0, 2.5))
    assert may_be_one(idle, idle)
    assert may_be_one(idle, busy)
    assert not may_be_one(idle, (Counters((1.0, 2.1)), Counters((1.0, 2.5))))
    assert not may_be_one(idle, (Counters((1.0, 2.0), started_at=5.0), Counters((1.0, 2.0), started_at=5.0)))
    assert not Counters((0.0, 1.0)).used


@pytest.mark.parametrize(
    ("plan", "seen", "longest", "words"),
    [
        (TrialPlan(), metrics(block=16), 8192, 2 * 16 + 16),
        (TrialPlan(), None, None, 2 * 128 + 16),
        (TrialPlan(), metrics(block=None), None, 2 * 128 + 16),
        (TrialPlan(number=3, least_tokens=512), metrics(block=16), 8192, 512 + 16 + 21),
        (TrialPlan(least_tokens=512), metrics(block=16), 100, 50),
        (TrialPlan(), metrics(block=100_000), 1_000_000, 4096),
    ],
)
def test_length_of_the_trial(plan: TrialPlan, seen: EngineMetrics | None, longest: int | None, words: int) -> None:
    """Two blocks, two chunks where lookups are made, no more than half of the context, and never much."""
    assert count_words(plan, seen, longest) == words
