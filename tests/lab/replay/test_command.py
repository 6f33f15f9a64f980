"""`kvproxy replay` as a user calls it."""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import re
import signal
from html.parser import HTMLParser
from pathlib import Path

import httpx
import pytest

from kvproxy.lab.replay.command import run
from kvproxy.lab.replay.options import add_arguments
from kvproxy.lab.replay.plot import render_html
from kvproxy.lab.replay.report import Recorded, ReplayReport, Review, Verdict
from kvproxy.lab.replay.results import summarize_outcomes
from kvproxy.lab.replay.scenarios import SCENARIOS
from kvproxy.lab.replay.trace import Half
from kvproxy.lab.simulator.retention import Eviction
from kvproxy.operate.commands.progress import ProgressBar
from tests.lab.replay.test_live import FakeServer
from tests.lab.replay.traces import lines


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    """Forty requests over five prefixes."""
    rows = [
        {"timestamp": number * 200, "input_length": 2000, "output_length": 10, "hash_runs": [100 * (number % 5), 3]}
        for number in range(40)
    ]
    path = tmp_path / "small.jsonl"
    path.write_text("\n".join(lines(*rows)))
    return path


def replay(*arguments: str | Path, transport: httpx.AsyncBaseTransport | None = None) -> tuple[int, str, str]:
    """Status, output, errors."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    out, err = io.StringIO(), io.StringIO()
    status = run(parser.parse_args([str(each) for each in arguments]), out=out, err=err, transport=transport)
    return status, out.getvalue(), err.getvalue()


def test_policies_side_by_side(trace_file: Path, tmp_path: Path) -> None:
    """Table, JSON and plot of one comparison."""
    files = (tmp_path / "figures.json", tmp_path / "plot.html")
    policies = "round_robin,kv_aware,kv_aware+queue,kv_aware+no_queue"
    status, table, _ = replay(trace_file, "--policy", policies, "--instances", "2",
                              "--seeds", "2", "--json", files[0], "--plot", files[1])  # fmt: skip
    assert status == 0
    rows = [line.split()[0] for line in table.splitlines()[2:6]]
    assert rows == ["round_robin", "kv_aware", "kv_aware+no_queue", "pooled"]
    figures = json.loads(files[0].read_text())
    assert (figures["trace"], figures["instances"], figures["load"]) == ("small", 2, 0.7)
    assert figures["policies"]["round_robin"]["vs_baseline"] == 1.0
    assert figures["policies"]["kv_aware"]["ttft_p99_s"] >= figures["policies"]["kv_aware"]["ttft_mean_s"] > 0
    assert figures["policies"]["kv_aware"]["requests"] == 40
    assert "kv_aware+no_queue" in files[1].read_text()


def test_engines_begin_from_a_preset_that_options_change(trace_file: Path, tmp_path: Path) -> None:
    """Every option reaches the engines, and the report says what they were."""
    file = tmp_path / "figures.json"
    arguments = ("--policy", "kv_aware+priority", "--instances", "2", "--json", file, "--engine", "h100")
    assert replay(trace_file, *arguments)[0] == 0
    fleet = json.loads(file.read_text())["settings"]["fleet"]
    assert (fleet["max_batched_tokens"], fleet["max_sequences"], fleet["reuse_outputs"]) == (8192, 1024, True)
    assert fleet["timing"]["prefill_floor_s"] == 0.008
    status, _, _ = replay(
        trace_file, *arguments, "--max-num-batched-tokens", "4096", "--max-num-seqs", "32", "--no-reuse-outputs",
        "--long-prefill-token-threshold", "1024", "--block-size", "64", "--prefill-floor", "0.01",
        "--capacity-tokens", "100000",
    )  # fmt: skip
    assert status == 0
    fleet = json.loads(file.read_text())["settings"]["fleet"]
    assert (fleet["max_batched_tokens"], fleet["max_sequences"], fleet["reuse_outputs"]) == (4096, 32, False)
    assert (fleet["long_prefill_token_threshold"], fleet["block_size"]) == (1024, 64)
    assert (fleet["capacity_tokens"], fleet["timing"]["prefill_floor_s"]) == (100_000, 0.01)


def test_engines_and_knowledge_can_be_disturbed(trace_file: Path) -> None:
    """Every option reaches the run."""
    status, table, _ = replay(
        trace_file, "--policy", "kv_aware", "--requests", "20", "--slow", "2,1", "--index", "approximate",
        "--open-loop", "--load", "0.5", "--baseline", "kv_aware", "--leave", "0:0.3,1:0.5", "--join", "0:0.6,7:0.2",
    )  # fmt: skip
    assert status == 0
    assert "small, both halves: 20 requests, 8 instances, load 0.5" in table


def test_several_routers_are_named_and_one_is_as_ever(trace_file: Path, tmp_path: Path) -> None:
    """`--routers 1` changes no figure; with more the title says how many, and how late each hears of the others."""
    files = [tmp_path / f"{name}.json" for name in ("ever", "one", "late", "deaf")]
    arguments = (trace_file, "--policy", "kv_aware,kv_aware+queue", "--instances", "2", "--json")
    several = ((), ("--routers", "1", "--delay", "50"), ("--routers", "4", "--delay", "50"),
               ("--routers", "3", "--no-exchange"))  # fmt: skip
    tables = [replay(*arguments, file, *more)[1] for file, more in zip(files, several, strict=True)]
    ever, one, late, deaf = (json.loads(file.read_text()) for file in files)
    assert tables[0] == tables[1]
    assert ever["policies"] == one["policies"] != late["policies"]
    assert tables[2].splitlines()[0].endswith("routers: 4, 50 ms late")
    assert tables[3].splitlines()[0].endswith("routers: 3, no exchange")
    assert (late["settings"]["routers"], deaf["settings"]["routers"]["delay_s"]) == (
        {"count": 4, "delay_s": 0.05},
        None,
    )
    assert late["reference"] == ever["reference"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("--policy", "best"), "no policy 'best'"), (("--instances", "0"), "at least 1"),
     (("--baseline", "lmetric", "--policy", "kv_aware"), "not among"), (("--slow", "x"), "--slow takes numbers"),
     (("--join", "3"), "--join takes engines"), (("--leave", "9:0.5"), "are numbered from 0"),
     (("--prefill-tokens-per-s", "0"), "must be positive"),
     (("--routers", "0"), "--routers is from 1 to 64, not 0"), (("--routers", "65"), "from 1 to 64"),
     (("--routers", "2", "--delay", "-1"), "--delay is from 0 to 10000 ms, not -1"),
     (("--routers", "2", "--delay", "nan"), "--delay is from 0"), (("--routers", "2", "--delay", "10001"), "10001"),
     (("--delay", "5"), "add --routers"), (("--no-exchange",), "add --routers"),
     (("--routers", "2", "--delay", "5", "--no-exchange"), "give one"),
     (("--routers", "2", "--policy", "kv_aware+move"), "+move needs a single router"),
     (("--routers", "2", "--policy", "places=2"), "rules of sessions need a single router"),
     (("--routers", "2", "--url", "http://127.0.0.1:9"), "neither --url nor --receipts")],
)  # fmt: skip
def test_a_wrong_option_is_an_error_message(trace_file: Path, arguments: tuple[str, ...], message: str) -> None:
    """Not a traceback."""
    status, table, errors = replay(trace_file, *arguments)
    assert (status, table) == (1, "")
    assert message in errors


def test_a_missing_or_broken_trace_is_an_error_message(tmp_path: Path) -> None:
    """With what is wrong."""
    (tmp_path / "bad.jsonl").write_text("nonsense")
    assert "bad, line 1" in replay(tmp_path / "bad.jsonl")[2]
    assert replay(tmp_path / "none.jsonl")[0] == 1


def test_caches_that_no_request_fits_are_an_error_message(trace_file: Path) -> None:
    """With the size that would do, and nothing of Python's."""
    status, table, errors = replay(trace_file, "--capacity-tokens", "1024")
    assert (status, table) == (1, "")
    assert "no request of the trace fits an engine's cache of 1024 tokens" in errors
    assert "2010" in errors


def test_a_live_run_has_one_row(trace_file: Path, tmp_path: Path) -> None:
    """Whatever policy the server has; what each endpoint served stands below. No key is written anywhere."""
    files = (tmp_path / "figures.json", tmp_path / "plot.html")
    arguments = (trace_file, "--url", "http://me:secret@proxy", "--pace", "0", "--requests", "8", "--api-key", "secret")
    status, table, _ = replay(*arguments, "--json", files[0], "--plot", files[1], transport=FakeServer())
    assert status == 0
    assert table.splitlines()[2].split()[0] == "live"
    assert [line.split() for line in table.splitlines()[-2:]] == [
        ["e1", "4", "4000", "1600"],
        ["e0", "4", "4000", "1600"],
    ]
    figures = json.loads(files[0].read_text())
    assert figures["policies"]["live"]["hit_rate"] == 0.4
    assert figures["endpoints"]["e0"] == {"requests": 4, "prompt_tokens": 4000, "cached_tokens": 1600}
    assert "secret" not in files[0].read_text() + files[1].read_text() + table


def test_failures_and_what_was_held_back_are_said(trace_file: Path) -> None:
    """How many, and why."""
    arguments = (trace_file, "--url", "http://proxy", "--pace", "0", "--requests", "8", "--concurrency", "1")
    status, table, _ = replay(*arguments, transport=FakeServer(trouble="status"))
    assert status == 0
    assert "live (2 failed)" in table
    assert "failed: 2 x status 429" in table
    assert "7 requests were held back by --concurrency" in table


def test_a_run_without_any_answer_is_an_error(trace_file: Path) -> None:
    """For scripts."""
    arguments = (trace_file, "--url", "http://proxy", "--pace", "0", "--requests", "8", "--model", "m")
    status, table, errors = replay(*arguments, transport=Deaf())
    assert (status, errors) == (1, "http://proxy ...\nkvproxy replay: no request was answered\n")
    assert "failed: 8 x no connection" in table


def test_ctrl_c_leaves_what_ended_before_it(trace_file: Path, tmp_path: Path) -> None:
    """The table and the JSON say that they are not the whole, and the exit status too."""
    arguments = (trace_file, "--url", "http://proxy", "--pace", "0", "--requests", "8", "--concurrency", "1")
    status, table, _ = replay(*arguments, "--json", tmp_path / "figures.json", transport=Interrupted(after=3))
    assert status == 130
    assert "3 of 8 requests" in table
    assert "interrupted" in table
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert (figures["interrupted"], figures["requests"], figures["policies"]["live"]["failed"]) == (True, 3, 0)


@pytest.mark.parametrize("option", [("--concurrency", "0"), ("--pace", "-1")])
def test_a_wrong_live_option_is_an_error_message(trace_file: Path, option: tuple[str, str]) -> None:
    """Before anything is sent."""
    status, _, errors = replay(trace_file, "--url", "http://proxy", *option, transport=FakeServer())
    assert status == 1
    assert option[0] in errors


def test_a_server_that_cannot_be_reached_is_an_error_message(trace_file: Path) -> None:
    """Before any request is sent: its models cannot be listed."""
    status, _, errors = replay(trace_file, "--url", "http://127.0.0.1:9", "--pace", "0")
    assert status == 1
    assert "cannot be reached" in errors


class Deaf(httpx.AsyncBaseTransport):
    """Takes no connection."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")


class Interrupted(FakeServer):
    """Ctrl-C is pressed while it answers."""

    def __init__(self, *, after: int) -> None:
        super().__init__()
        self._after = after

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await super().handle_async_request(request)
        if len(self.bodies) > self._after:
            signal.raise_signal(signal.SIGINT)
            await asyncio.Event().wait()
        return response


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_progress_is_one_line_on_a_terminal() -> None:
    """Redrawn when the percentage changes, and taken away at the end."""
    terminal = Terminal()
    bar = ProgressBar(400, out=terminal)
    bar.begin("kv_aware")
    for done in range(201):
        bar.advance(done)
    bar.end(200)
    bar.begin("lmetric")
    bar.close()
    text = terminal.getvalue()
    assert text.count("\r") <= 54
    assert "50 %  kv_aware" in text
    assert "50 %  lmetric" in text
    assert text.endswith("\r\033[K")


def test_nothing_is_drawn_elsewhere() -> None:
    """A log file wants no bar, only what has begun."""
    log = io.StringIO()
    bar = ProgressBar(0, out=log)
    bar.begin("kv_aware")
    bar.advance(1)
    bar.close()
    assert log.getvalue() == "kv_aware ...\n"


class Tags(HTMLParser):
    """Collects tags, and whatever is loaded from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.loads += [name for name, _ in attrs if name in ("src", "href")]


def test_a_plot_is_a_page(trace_file: Path, tmp_path: Path) -> None:
    """Another ending would promise another kind of file: refused before anything is played."""
    status, table, errors = replay(trace_file, "--plot", tmp_path / "plot.png")
    assert (status, table) == (1, "")
    assert errors == f"kvproxy replay: --plot writes an HTML page: name it {tmp_path / 'plot.html'}\n"
    assert not (tmp_path / "plot.png").exists()


def test_the_table_says_its_units_and_what_was_repeated(tmp_path: Path) -> None:
    """Sessions of a few turns are played more than once, and the title says so."""
    rows = [
        {"timestamp": 0, "session_id": 1, "input_length": 150, "output_length": 8, "hash_runs": [0, 2]},
        {"delay": 20, "session_id": 1, "input_length": 280, "output_length": 8, "hash_runs": [0, 4]},
    ]
    trace_file = tmp_path / "chat.jsonl"
    trace_file.write_text("\n".join(lines(*rows)))
    status, table, errors = replay(trace_file, "--policy", "round_robin", "--instances", "2")
    assert status == 0
    assert re.search(r": \d+ requests \(2, repeated\), 2 instances", table.splitlines()[0])
    assert "e2e: s; ITL p99: ms" in table
    assert errors.startswith("calibrating the load on one pooled cache ...\nround_robin ...\n")


@pytest.mark.parametrize(("seconds", "shown"), [(-0.0001, "0.000"), (0.0, "0.000"), (-0.5, "-0.500"), (0.25, "+0.250")])
def test_no_sign_without_a_figure(seconds: float, shown: str) -> None:
    """-0.000 is not a difference."""
    verdict = Verdict(0, 0.0, None, None, None, 1.0, seconds, 0.5)
    table = Review("r", 0, Recorded(1, 1, ("random",), 1.0, None, 0.5), {"kv_aware": verdict}).render_table()
    assert table.splitlines()[3].split()[-2] == shown


def test_the_plot_loads_nothing_and_survives_empty_runs() -> None:
    """One file, inline SVG; names are escaped."""
    report = ReplayReport("<b>", Half.BOTH, 2, 0.7, 0, 0.0, None, "none", {"none": [summarize_outcomes([], 2)]}, {})
    page = Tags()
    page.feed(render_html(report, {"none": []}))
    assert page.loads == []
    assert "svg" in page.seen
    assert "b" not in page.seen
    text = render_html(report, {"none": []})
    assert all(f">{share}%<" in text for share in (0, 25, 50, 75, 100))


def test_scenarios_are_listed_and_played() -> None:
    """Each with its own load; several are one document."""
    status, table, _ = replay("--scenario", "list")
    assert status == 0
    assert [line.split()[0] for line in table.splitlines()] == list(SCENARIOS)
    assert max(map(len, table.splitlines())) <= 100


@pytest.mark.slow
def test_a_scenario_needs_no_trace(tmp_path: Path) -> None:
    """Its workload, its load; a given load is taken instead; several are one document."""
    file = tmp_path / "figures.json"
    arguments = ("--requests", "200", "--policy", "lmetric,kv_aware", "--instances", "2", "--json", file)
    status, table, _ = replay("--scenario", "herd,false_20", "--half", "report", *arguments)
    assert status == 0
    assert "herd, report half: 200 requests, 2 instances, load 0.85" in table
    assert "false_20, report half: 200 requests, 2 instances, load 0.7" in table
    assert [each["trace"] for each in json.loads(file.read_text())["scenarios"]] == ["herd", "false_20"]
    _, table, _ = replay("--scenario", "unique", "--load", "0.4", *arguments)
    assert "load 0.4" in table
    assert json.loads(file.read_text())["trace"] == "unique"


def test_disturbances_of_a_fleet_may_be_played_on_a_trace(trace_file: Path, tmp_path: Path) -> None:
    """In the workload's place."""
    file = tmp_path / "figures.json"
    status, table, _ = replay(trace_file, "--scenario", "slow_half", "--policy", "kv_aware", "--instances", "4",
                              "--json", file)  # fmt: skip
    assert status == 0
    assert "small with slow_half, both halves: 40 requests" in table
    assert json.loads(file.read_text())["settings"]["fleet"]["slowness"] == [2.5, 2.5]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("--scenario", "herds"), "did you mean 'herd'?"), (("--scenario", "herd", "--url", "http://a"), "neither"),
     (("TRACE", "--scenario", "herd"), "herd is a workload of its own"), ((), "one of TRACE, --scenario")],
)  # fmt: skip
def test_a_scenario_that_cannot_be_is_an_error_message(
    trace_file: Path, arguments: tuple[str, ...], message: str
) -> None:
    """Nothing is played."""
    status, table, errors = replay(*(trace_file if each == "TRACE" else each for each in arguments))
    assert (status, table) == (1, "")
    assert message in errors


def test_tiers_below_engine_memory(trace_file: Path, tmp_path: Path) -> None:
    """Aware of them and blind, on the same engines: what left engine memory is found on the host."""
    policies, out = "kv_aware+tier_blind,kv_aware", tmp_path / "figures.json"
    hits = []
    for tiers in ("device=0.3,host=0", "device=0.3,host=8,gbps=20,shared=2,shared_gbps=5,latency=0.001"):
        status, table, error = replay(trace_file, "--instances", "1", "--capacity-tokens", "8192", "--policy", policies,
                                      "--tiers", tiers, "--json", out)  # fmt: skip
        assert (status, "kv_aware+tier_blind" in error) == (0, True)
        assert [line.split()[0] for line in table.splitlines()[2:4]] == policies.split(",")
        figures = json.loads(out.read_text())["policies"]
        hits.append([figures[policy]["hit_rate"] for policy in policies.split(",")])
    assert hits[0][0] == hits[0][1] < min(hits[1])


def test_lower_tiers_can_fail_and_fill_up(trace_file: Path, tmp_path: Path) -> None:
    """Every part of the option reaches the engines, and every order of eviction can be played."""
    out = tmp_path / "figures.json"
    run = ("--instances", "1", "--capacity-tokens", "8192", "--policy", "kv_aware", "--json", out)
    tiers = "device=0.3,host=1,disk=4,failing_reads=7"
    rates = {}
    for eviction in Eviction:
        assert replay(trace_file, *run, "--tiers", tiers, "--eviction", eviction)[0] == 0
        report = json.loads(out.read_text())
        rates[eviction] = report["policies"]["kv_aware"]["hit_rate"]
        assert report["settings"]["fleet"]["eviction"] == eviction
    plan = report["settings"]["fleet"]["tiers"]
    assert (plan["disk"], plan["failing_reads"]) == (4, 7)
    assert min(rates.values()) > 0
    assert len(set(rates.values())) > 1


@pytest.mark.parametrize(
    ("tiers", "complaint"),
    [
        ("failing_reads=1.5", "a whole number"),
        ("device=0.25,ghost=4", "ghost=4"),
        ("host=much", "host=much"),
        ("device=0", "above 0"),
        ("gbps=0", "above 0"),
    ],
)
def test_impossible_tiers_are_refused(trace_file: Path, tiers: str, complaint: str) -> None:
    """With what is possible."""
    status, _, error = replay(trace_file, "--tiers", tiers)
    assert status == 1
    assert complaint in error
