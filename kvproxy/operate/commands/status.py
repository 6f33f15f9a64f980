"""`kvproxy status`: what the admin listener's live page shows, as text for a terminal."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

import httpx

from kvproxy.base.installed import installed
from kvproxy.operate.capabilities import format_capabilities
from kvproxy.operate.commands.operate import AdminAddress, AdminRefused, ask_admin
from kvproxy.operate.feature import Feature

INTERVAL_S = 1.0
#: The terminal's other screen without a cursor, and back.
_OTHER_SCREEN = "\x1b[?1049h\x1b[?25l"
_BACK = "\x1b[?25h\x1b[?1049l"
_COLOURS = {"good": "32", "warn": "33", "down": "31;1", "quiet": "2"}
#: Findings that need no action soon.
_FOLDED = frozenset({"note", "ok"})
_DOWN = frozenset({"unhealthy", "ejected", "breaker_open"})
_DECISIONS = 8
_EVENTS = 5
Cell = tuple[str, str]  # text, colour name or ""
_ENDPOINT_HEADS = (
    "ENDPOINT",
    "STATE",
    "REQ/MIN",
    "ERR/MIN",
    "TTFT P95",
    "IN FLIGHT",
    "PENDING",
    "KV",
    "QUEUE",
    "SPEED",
    "KV EVENTS",
)
_QUEUE_HEADS = ("ROUTER QUEUE", "STATE", "WAITING", "OLDEST", "IN TURN", "AT BOUND", "LEFT", "NO ENDPOINT", "REFUSED")
_RESULTS = {"ok": "good", "failed": "down", "client_error": "warn", "client_left": "quiet"}
_DECISION_HEADS = ("ENDED", "REQUEST", "MODEL", "ENDPOINT", "WHY", "PROMPT", "PREDICTED", "REUSED", "FIRST BYTE", "END")


def main(args: argparse.Namespace) -> int:
    """`kvproxy status`."""
    address = AdminAddress(args.url, args.token_file)
    return run(address, watch=args.watch, as_json=args.json, out=sys.stdout, err=sys.stderr)


def run(
    address: AdminAddress,
    *,
    watch: bool = False,
    as_json: bool = False,
    out: TextIO,
    err: TextIO,
    sleep: Callable[[float], None] = time.sleep,
    transport: httpx.BaseTransport | None = None,
) -> int:
    """Show it once, or again and again until Ctrl-C. 1 when the only attempt gets no answer."""
    colour = out.isatty() and "NO_COLOR" not in os.environ
    with address.connect(transport=transport) as client:

        def shown() -> str:
            live = _ask(client, address.url)
            return f"{json.dumps(live)}\n" if as_json else render_page(live, colour=colour)

        if watch:
            return _watch(shown, out=out, over=out.isatty() and not as_json, sleep=sleep)
        try:
            out.write(shown())
        except AdminRefused as error:
            print(f"kvproxy status: {error}", file=err)
            return 1
    return 0


def _watch(shown: Callable[[], str], *, out: TextIO, over: bool, sleep: Callable[[float], None]) -> int:
    """On the terminal's other screen, so that what was there before is there again afterwards."""
    enter, leave = (_OTHER_SCREEN, _BACK) if over else ("", "")
    try:
        out.write(enter)
        while True:
            try:
                text = shown()
            except AdminRefused as error:
                text = f"{error}\n"
            out.write(_over(text) if over else text + "\n")
            out.flush()
            sleep(INTERVAL_S)
    except (KeyboardInterrupt, BrokenPipeError):
        return 0
    finally:
        with contextlib.suppress(BrokenPipeError):
            out.write(leave)
            out.flush()


def _over(text: str) -> str:
    """Written over what is on the screen, without a flicker."""
    return "\x1b[H" + text.replace("\n", "\x1b[K\n") + "\x1b[J"


def _ask(client: httpx.Client, url: str) -> dict[str, Any]:
    data = ask_admin(client, url, "/live")
    if "endpoints" not in data:
        raise AdminRefused(f"{url} answers 200 (--url)")
    return data


def render_page(live: Mapping[str, Any], *, colour: bool = False) -> str:
    """Return the whole screen. Control characters in names that clients chose are shown as `?`."""
    parts = [feature.show_status(live, colour=colour) for feature in installed(Feature)]
    blocks = [
        [_headline(live, [words for part in parts for words in part.headline])],
        _findings(live["findings"]),
        [plain(f"{span(one['ago_s'])} ago: {one['what']}") for one in live["events"][:_EVENTS]],
        table(_ENDPOINT_HEADS, [_endpoint(live, one) for one in live["endpoints"]], colour=colour),
        [_routing(live, name, one) for name, one in live["routing"].items()],
        table(_QUEUE_HEADS, _queues(live["routing"]), colour=colour),
        [plain(line) for line in describe_capacities(live["endpoints"])],
        [plain(line) for line in describe_steps(live["endpoints"])],
        [plain(line) for line in describe_adapters(live["endpoints"])],
        [plain(line) for line in format_capabilities(live["capabilities"])],
        _cache(live["cache"]),
        *(block for part in parts for block in part.blocks),
        table(_DECISION_HEADS, [_decision(one) for one in live["decisions"][:_DECISIONS]], colour=colour),
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def _headline(live: Mapping[str, Any], more: Sequence[str]) -> str:
    minute = live["last_minute"]
    history = live["history"]
    ttft = next((value for value in reversed(history["ttft_p50_s"]) if value is not None), None)
    prompt = sum(history["prompt_tokens"])
    cached = sum(history["cached_tokens"])
    predicted = sum(history["predicted_tokens"])
    state = live["state"]
    since = "" if state["since_s"] is None else f" for {span(state['since_s'])}"
    parts = [
        f"kvproxy {live['version']}: {state['sentence']}{since}",
        f"running for {span(live['uptime_s'])}",
        f"last minute {minute['requests']:,} requests, {minute['failed']:,} failed",
        f"first byte {seconds(ttft)}, p95 {seconds(live['ttft']['p95_s'])}",
    ]
    if (file := live["config_file"]) is not None:
        parts.insert(2, f"{file['name']} loaded {span(file['loaded_s_ago'])} ago")
    parts[2:2] = more
    if prompt:
        parts.append(f"from cache {percent(cached / prompt)} (predicted {percent(predicted / prompt)})")
    if (saved := minute.get("saved_prefill_s")) is not None:
        parts.append(f"{seconds(saved)} of prefill saved")
    return plain(" | ".join(parts))


def _findings(findings: Sequence[Mapping[str, Any]]) -> list[str]:
    """In the order of the live page, which is that of what hurts; notes are only counted."""
    lines = [_finding(one) for one in findings if one["severity"] not in _FOLDED]
    if notes := sum(one["severity"] in _FOLDED for one in findings):
        lines.append(f"{notes} {'note' if notes == 1 else 'notes'} more: on the live page, or `kvproxy check`")
    return lines


def _finding(one: Mapping[str, Any]) -> str:
    fix = f" ({one['fix']})" if one["fix"] else ""
    age = f" [{span(one['age_s'])}]" if "age_s" in one else ""
    return plain(f"{one['severity']}: {one['where']}: {one['what']}{fix}{age}")


def _endpoint(live: Mapping[str, Any], one: Mapping[str, Any]) -> list[Cell]:
    engine = {} if one["condition"] in _DOWN else one.get("engine") or {}
    cache = one.get("cache") or {}
    learned = live["routing"].get(one["cluster"], {}).get("learned", {})
    slowness = learned.get("slowness", {}).get(one["id"]) if one["condition"] not in _DOWN else None
    waiting = engine.get("waiting")
    errors = one["errors_last_minute"]
    return [
        (one["id"], ""),
        _state(one),
        (str(one["requests_last_minute"]), ""),
        (str(errors), "down" if errors else ""),
        (seconds(one["ttft_p95_s"]), ""),
        (str(one["in_flight"]), ""),
        (str(one["pending_tokens"]), ""),
        ("-" if engine.get("kv_usage") is None else percent(engine["kv_usage"]), ""),
        ("-" if waiting is None else f"{waiting}+{engine.get('running') or 0}", ""),
        (f"{1 / slowness:.2f}x" if slowness else "-", ""),
        (_events(one, cache), ""),
    ]


def _events(one: Mapping[str, Any], cache: Mapping[str, Any]) -> str:
    """Describe the event streams. None is no fault: most engines publish no events. The index of a dead engine is of no
    use."""
    if not cache:
        return "-"
    if not cache["streams"]:
        return "not followed"
    return "not used" if one["condition"] in _DOWN else str(cache["state"])


def _state(one: Mapping[str, Any]) -> Cell:
    condition = one["condition"]
    if condition in _DOWN:
        return condition.replace("_", " "), "down"
    if condition != "up":
        return condition, "warn"
    if one["probes_in_doubt"]:
        return "not answering", "down"
    return ("failing", "warn") if one["failures_in_a_row"] else ("up", "good")


def _routing(live: Mapping[str, Any], name: str, one: Mapping[str, Any]) -> str:
    learned = one["learned"]
    minute = live["clusters"].get(name, {"requests": 0, "failed": 0})
    facts = [f"{name}: {one['policy']}"]
    if len(live["routing"]) > 1:
        facts.append(f"{minute['requests']:,} requests in the last minute, {minute['failed']:,} failed")
    if learned.get("samples") == 0:
        without = learned.get("requests_without_sample")
        facts.append(f"learning: no sample {f'in {without:,} requests ' if without else ''}yet")
    elif "samples" in learned:
        facts.append(f"{learned['tokens_per_s']:,.0f} tokens/s prefill after {_samples(learned)}")
        if "rho" in learned:
            facts.append(f"rho {learned['rho']:.2f}")
    return plain(", ".join(facts))


def _samples(learned: Mapping[str, Any]) -> str:
    kinds = learned.get("samples_by_kind", {})
    by = ", ".join(f"{count:,} {kind}" for kind, count in kinds.items() if count)
    return f"{learned['samples']:,} samples" + (f" ({by})" if by else "")


def _queues(routing: Mapping[str, Any]) -> list[list[Cell]]:
    return [_queue(name, one["queue"]) for name, one in routing.items() if one.get("queue")]


def _queue(name: str, queue: Mapping[str, Any]) -> list[Cell]:
    depth = queue["depth"]
    limit = queue["limit"]
    oldest = queue["oldest_wait_s"]
    released = queue["released"]
    state: Cell = ("holds requests", "good") if depth else ("empty", "")
    if depth >= limit:
        state = ("full", "down")
    elif depth and oldest >= queue["max_wait_s"] / 2:
        state = ("long waits", "warn")
    ways = ("max_wait", "client_left", "no_endpoint")
    return [
        (name, ""),
        state,
        (f"{depth:,} of {limit:,}", ""),
        (seconds(oldest) if depth else "-", ""),
        (f"{released['turn'] + released['room']:,}", ""),
        *((f"{released[way]:,}", "") for way in ways),
        (f"{queue['refused']:,}", "warn" if queue["refused"] else ""),
    ]


def _cache(cache: Mapping[str, Any] | None) -> list[str]:
    if cache is None:
        return []
    running = ", ".join(one["about"] for one in cache["running"]) or "nothing"
    lines = [f"cache work: {running} running, {cache['waiting']} waiting, {cache['leases']} pinned prefixes"]
    shut = [f"{name} {state}" for name, state in cache["breakers"].items() if state != "closed"]
    if shut:
        lines.append(f"breakers: {', '.join(shut)}")
    return [plain(line) for line in lines]


def _decision(one: Mapping[str, Any]) -> list[Cell]:
    how = (one["local_reason"] or one["end"]).replace("_", " ")
    end = str(one["status"]) if one["end"] == "completed" else f"{one['status']} {how}"
    retries = f" +{one['retries']}" if one["retries"] else ""
    return [
        (f"{span(one['ago_s'])} ago", "quiet"),
        (one["request_id"][:13] or "-", ""),
        (one["model"][:24] or "-", ""),
        (one["endpoint"] or "-", ""),
        (one["reason"] or "-", ""),
        (number(one["prompt_tokens"]), ""),
        (number(one["matched_tokens"]), ""),
        (number(one["cached_tokens"]), ""),
        (seconds(one["ttft_s"]), ""),
        (end + retries, _RESULTS[one["result"]]),
    ]


def table(heads: Sequence[str], rows: Sequence[Sequence[Cell]], *, colour: bool) -> list[str]:
    """Return lines with columns; none where there are no rows."""
    if not rows:
        return []
    cleaned = [[(plain(text), kind) for text, kind in row] for row in rows]
    widths = [max(len(head), *(len(row[i][0]) for row in cleaned)) for i, head in enumerate(heads)]
    lines = ["  ".join(head.ljust(width) for head, width in zip(heads, widths, strict=True)).rstrip()]
    for row in cleaned:
        cells = [_painted(cell, width, colour=colour) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines


def _painted(cell: Cell, width: int, *, colour: bool) -> str:
    text, kind = cell
    padded = text.ljust(width)
    return f"\x1b[{_COLOURS[kind]}m{padded}\x1b[0m" if colour and kind else padded


def plain(text: str) -> str:
    """Return the text with `?` for control characters."""
    return "".join(each if each.isprintable() else "?" for each in text)


def number(value: int | None) -> str:
    """`1,234`; `-` for none."""
    return "-" if value is None else f"{value:,}"


def percent(share: float) -> str:
    """`12%`."""
    return f"{share:.0%}"


def seconds(value: float | None) -> str:
    """`250ms`, `1.5s`; `-` for none."""
    if value is None:
        return "-"
    return f"{value * 1000:.0f}ms" if value < 1 else f"{value:.1f}s"


def span(duration_s: float) -> str:
    """`90s`, `3h`."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if duration_s >= 2 * size:
            return f"{duration_s / size:.0f}{unit}"
    return f"{duration_s:.0f}s"


#: A learned cache size that differs from the engine's by this factor is shown.
_NOTABLE = 1.5
#: Endpoints, and adapters, named one by one.
_NAMED = 3


def describe_capacities(endpoints: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of engines that keep much more or less than their cache size promises."""
    return [_learned(one) for one in endpoints if _unlike_told(one)]


def _unlike_told(one: Mapping[str, Any]) -> bool:
    cache = one.get("cache") or {}
    told = cache.get("told_capacity_blocks", 0)
    learned = cache.get("approximate_capacity_blocks", 0)
    return bool(told) and not 1 / _NOTABLE < learned / told < _NOTABLE


def _learned(one: Mapping[str, Any]) -> str:
    cache = one["cache"]
    ratio = cache["approximate_capacity_blocks"] / cache["told_capacity_blocks"]
    foreign = (cache.get("hit_ratio") or {}).get("foreign")
    others = f"; {foreign:.0%} of its lookups are sent by others" if foreign else ""
    return f"{one['id']} keeps {ratio:.0%} of its reported cache size (learned){others}"


def describe_steps(endpoints: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of engines that reuse in long steps; mostly all of them are alike."""
    alike: dict[int, list[str]] = {}
    for one in endpoints:
        if step := (one.get("cache") or {}).get("reuse_step_tokens"):
            alike.setdefault(step, []).append(one["id"])
    return [
        f"{_some(names)} {'reuses' if len(names) == 1 else 'reuse'} in steps of {step:,} tokens; "
        f"prompts under {step:,} never hit"
        for step, names in alike.items()
    ]


def describe_adapters(endpoints: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of engines that serve LoRA adapters: how many, and which are in their slots."""
    lines = []
    for one in endpoints:
        if adapters := one.get("adapters"):
            count = len(adapters["served"])
            loaded = adapters["loaded"]
            slots = adapters["slots"]
            room = f" of {slots} slots" if slots else ""
            line = f"{one['id']} serves {count} adapter{'s' * (count != 1)}, {len(loaded)}{room} loaded"
            lines.append(f"{line}: {_some(loaded)}" if loaded else line)
    return lines


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
