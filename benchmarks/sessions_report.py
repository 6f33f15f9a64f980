"""The report of `benchmarks.sessions`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from benchmarks.markdown import table

Row = Mapping[str, Any]
Rows = Sequence[Row]

HEAD = """# Sessions beyond the engines' memory

`python -m benchmarks.sessions`

Batches of agents, all begun within 20 s, each played once in virtual time; engines as vLLM sets itself up on an H100
with 20,000 tokens of prefill a second. *agents*: engines of 400,000 tokens, a common system prompt of 8,192 tokens, 6
to 70 turns, contexts of 12,000 to 130,000 tokens, 86 % of the gaps under a second. *mixed*: as many requests of chats
beside them. *cc*, *agent*: sessions of those traces. *forks*: every second agent begins with the middle of another
one's context. *paused*: a human looks at every tenth answer. *talks*: pauses of 5 to 25 s. *giant*: one session in
sixteen begins with 200,000 tokens. *lost*: the last engine goes in the middle. *host*: host memory behind each
engine, in multiples of the engine's, written through (a token's KV is 128 KiB). *needs*: the contexts over the
memory, what several share counted once.

`thunderagent` and `vllm_router` are those schedulers' rules, with the engines' true memory and speeds and every
session's end known to them; `places=N`, with the best N, admits N sessions on each engine to their end. `kv_aware` is
kvproxy with nothing configured: it knows sessions by their prompts, not their ends, and admits them where an engine
has room; `+no_admission` admits all at once. Sessions an hour; s from a session's start to its last answer; TTFT of
first requests, 90 %; the longest until an engine admitted a request, or, of one that was refused after `max_wait`
(540 s), since it came again at once; share of prompt tokens found in cache; Jain's index of the sessions' slowdowns
against their time alone; correlation of a request's wait with its prompt's length. Chat: TTFT.

Where all sessions fit nothing differs: mean and p99 of TTFT of the five traces (eight engines, load 0.7) are the same
to the last digit with admission and without.

Host memory is no room: counted as such (twice an engine's, contexts of four times the memory) 256 agents took 1,082 s
each if it is read at 20 GB/s and 1,511 s at 5 GB/s, 452 and 321 sessions an hour. By the engines' memory alone they
take the time of `agents-4-4`.

Figures that are missed, and why:

- `agents` at 1.5 times: no rule is below 0.45 of off's session time, the best number at once neither.
- `agent`: the memory of an engine holds 1 to 2 s of prefill, sessions pause for 3 s. It cannot save more than the
  engines have left, and nothing waits: no cliff is there with all of them at once, and no gain without. Where they
  were made to wait until engines prefilled for less than 0.15 of their time, sessions took 1.06 to 1.36 of the time.
- `cc`: of the prompt tokens 0.27 are computed in `cc-4-2`, 0.19 of them again after one of the 30 % of pauses that
  are longer than 30 s, in which a session is no resident. `places` keeps contexts over these (hits of 0.95 at 1.5
  times and twice the memory, 0.81 at four times) while others wait for an hour or more, and takes 0.81, 0.47 and 0.53
  of off's session time: 0.45 is reached by none, hits of 0.90 only with waits of seven times `max_wait`.
- `mixed-4-4`: `thunderagent` ends sessions sooner (1,148 s), since its chats wait too: TTFT of 1,423 s in 1 of 100.
  Here 76 new sessions are refused instead and chats take memory as they come: 72 s. No way for sessions to be as fast
  beside chats that do not wait was found: neither taking turns nor another session that gives way (below).
- Fairness: of a batch that begins at once the last sessions wait longest, whatever their own time is. At four times
  the memory `places` is at 0.55 to 0.59, `thunderagent` at 0.80 to 0.84, `vllm_router`, which takes places away after
  14 turns, at 0.88 to 0.90 with 1.2 of the session time; all at once, each as slow as the other, 0.93. In `cc` and
  `forks` no rule reaches 0.9. Simpler rules, means of three draws (two of `mixed-4-4`): in the order of their own work,
  as other requests go, 0.80 in `forks-4-2` (0.79), 0.88 in `agents-2-4` (0.86) and `agents-4-4` (0.87), 0.71 in
  `mixed-4-4` (0.73), there at 0.97 of the sessions an hour; with no room kept for the first in line 0.79, 0.88, 0.87
  and 0.72, there at 0.96; where none gives way session times are 1.06 to 1.85 of these. They are left.
- The frontier: taking turns (round robin: a session gives up its place after so many turns while others wait), "never"
  is the rule.

  | cell | after turns | sessions/h | session s | 90 % | hit | fair |
  |---|---|---|---|---|---|---|
  | agents-4-4 | never | 462 | 990 | 1685 | 0.907 | 0.88 |
  | agents-4-4 | 20 | 454 | 1024 | 1685 | 0.897 | 0.90 |
  | agents-4-4 | 16 | 459 | 1033 | 1715 | 0.890 | 0.94 |
  | agents-4-4 | 10 | 417 | 1114 | 1810 | 0.868 | 0.95 |
  | agents-4-4 | 3 | 304 | 1520 | 2585 | 0.719 | 0.94 |
  | agents-2-4 | never | 242 | 998 | 1621 | 0.914 | 0.84 |
  | agents-2-4 | 20 | 235 | 1044 | 1617 | 0.902 | 0.92 |
  | agents-2-4 | 14 | 232 | 1056 | 1682 | 0.890 | 0.95 |
  | agents-4-2 | never | 466 | 502 | 774 | 0.920 | 0.96 |
  | agents-4-2 | 16 | 440 | 525 | 812 | 0.904 | 0.96 |
  | mixed-4-4 | never | 370 | 1420 | 2183 | 0.863 | 0.75 |
  | mixed-4-4 | 16 | 334 | 1602 | 2418 | 0.816 | 0.87 |
  | forks-4-2 | never | 414 | 324 | 578 | 0.911 | 0.71 |
  | forks-4-2 | 16 | 428 | 325 | 590 | 0.909 | 0.83 |
  | talks-4-4 | never | 258 | 1815 | 2928 | 0.810 | 0.81 |
  | talks-4-4 | 16 | 257 | 1808 | 2946 | 0.789 | 0.89 |
  | cc-4-4 | never | 35 | 4829 | 7968 | 0.616 | 0.74 |
  | cc-4-4 | 16 | 36 | 4782 | 7988 | 0.625 | 0.79 |

  So 0.9 goes with 0.45 of off's session time and 0.95 of the best throughput for agents at four times the memory, at
  hits of 0.89 to 0.90; 16 turns do not reach it in the other shapes, where no other number was played. The same rule
  costs 1.05 of the session time at twice the memory and 1.13 beside chats, which are behind `thunderagent` as it is:
  it is left. By time instead of turns, at the wait of the first in line, `agents-4-2` has 713 s a session; at half of
  it `talks-4-4` is at 0.95 with 1,871 s and hits of 0.73, `mixed-4-4` at 0.90. Whether the session that began last,
  that has its place longest, that had most turns or the smallest one gives way to growing contexts changes neither:
  0.87 to 0.88 and 989 to 997 s in `agents-4-4`, 0.71 to 0.76 and 1,420 to 1,578 s in `mixed-4-4`.
- No request waits at the router for longer than `max_wait` (540 s). In waits of 541 to 577 s the rest is the engine's
  own queue: up to 53 s.
- Evicting a session's context at its end, which keeps residents as if they were pinned, changes nothing:
  `agents-4-1.5` 391 s (389 s), `agents-4-2` 524 s (525 s).
- Ends: an answer without a tool call is the last one of an agent here; of *cc* and *agent* that is not known.
- Four routers that tell each other 10 ms late, where the rule knows that agents end so: told of these ends, 445
  sessions an hour and 762 s in the mean of `agents-4-2` and `agents-4-4`, two draws each; not told, 437 and 771 s.
- `talks`, conversations that pause for 5 to 25 s: all at once is no cliff at 1.2 times the memory (545 s), one at 2.4
  (1,548 s). Not to admit by memory where it holds less than 1.5, 2 or 3 pauses of prefill, instead of one, gave such
  conversations 1,069, 1,410 and 1,410 s at 2.4 times instead of 855 s, before it helped at 1.2. Room besides for what
  an engine computes in a quarter of the pauses: TTFT of 20 s in 1 of 100 at 1.2 times (124 s without), but 1,010 s
  instead of 925 s at 2.4, and `cc-4-4` 5,040 s instead of 4,776 s. That no session gives way to so much more: 84 s in
  1 of 100, 918 s at 2.4, and 4,831 s. This is the rule.
- `talks-4-4` depends on the draw: 1,815, 1,787, 1,909 and 1,577 s a session in seeds 1 to 4. Where a pool of which
  nothing is known counts as idle instead of half busy, as it did before, it is 1,694, 1,787 (the same to the digit),
  1,971 and 1,600 s: no rule of sessions made the first one slower. Of 14 cells played again after that change 10 are
  the same to the digit, and `agents-4-4`, `mixed-4-4`, `talks-4-4` and `agents-16-2` within 8 %.
- Tokens that are not counted: where no answer has a `usage`, prompts of digits (1.25 bytes a token) count as 0.31 of
  what they are at four bytes a token. `agents-4-2` so: hits of 0.48, 212 sessions an hour, 1,215 s a session, the
  figures without admission, as it admits all. With the count that the first answer causes (`/tokenize`) 0.92, 448
  and 511 s; with all counted from the start 0.92, 466 and 502 s.
- A next turn that must be longer than prompt and answer before it would tell short questions about one document from
  a conversation, but 9 % of the turns in *cc* and 20 % in *agent* are shorter: reasoning is left out of the history.
"""

COLUMNS = (
    ("sessions/h", "sessions_per_hour", "{:.0f}"),
    ("session s", "session_mean_s", "{:.0f}"),
    ("90 %", "session_p90_s", "{:.0f}"),
    ("first 90 %", "first_answer_p90_s", "{:.1f}"),
    ("wait max", "wait_max_s", "{:.0f}"),
    ("hit", "hit_rate", "{:.3f}"),
    ("fair", "fairness", "{:.2f}"),
    ("wait~len", "wait_by_length", "{:.2f}"),
    ("failed", "failed", "{:.0f}"),
)
CHAT = (("chat mean", "chat_mean_s", "{:.2f}"), ("chat 99 %", "chat_p99_s", "{:.2f}"))


#: Runs with and without admission of sessions.
ON, OFF = "kv_aware", "kv_aware+no_admission"
PEERS = ("thunderagent", "vllm_router")


class Wanted(NamedTuple):
    """A figure that is wanted in every cell; by the policies' rows, means over seeds."""

    title: str
    value: Callable[[Mapping[str, Row]], float | None]
    holds: Callable[[float], bool]


def _against(
    figure: str, *others: str, best: Callable[..., float] = max
) -> Callable[[Mapping[str, Row]], float | None]:
    def value(policies: Mapping[str, Row]) -> float | None:
        theirs = [policies[name][figure] for name in others if figure in policies.get(name, {})]
        return policies[ON][figure] / best(theirs) if theirs and figure in policies[ON] else None

    return value


WANTED = (
    Wanted("sessions/h over places", _against("sessions_per_hour", "places"), lambda value: value >= 0.95),
    Wanted("hit", lambda policies: policies[ON]["hit_rate"], lambda value: value >= 0.9),
    Wanted("session over off", _against("session_mean_s", OFF), lambda value: value <= 0.45),
    Wanted("sessions/h over peers", _against("sessions_per_hour", *PEERS), lambda value: value >= 1.0),
    Wanted("session over peers", _against("session_mean_s", *PEERS, best=min), lambda value: value <= 1.0),
    Wanted("90 % over peers", _against("session_p90_s", *PEERS, best=min), lambda value: value <= 1.0),
    Wanted("fair", lambda policies: policies[ON]["fairness"], lambda value: value >= 0.9),
    Wanted("wait~len", lambda policies: policies[ON]["wait_by_length"], lambda value: value < 0.2),
    Wanted("chat 99 % over off", _against("chat_p99_s", OFF), lambda value: value <= 1.0),
)


#: Bounds that no other run is part of: what the others have there shows whether they can be reached.
_BOUNDS = ("hit", "session over off", "fair")
_OTHERS = ("places", *PEERS, OFF)


def _wanted(rows: Rows) -> list[str]:
    """Return what is wanted of sessions that are admitted, cell by cell, what is missed in bold; and what the other
    rules have where a bound is missed."""
    cells: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        cells.setdefault(row["cell"], {}).setdefault(row["policy"].partition("=")[0], []).append(row)
    body = []
    missed = []
    for cell, policies in cells.items():
        if ON in policies and OFF in policies:
            means = {name: _mean(runs) for name, runs in policies.items()}
            found = [(wanted, wanted.value(means)) for wanted in WANTED]
            body.append([cell, *("" if value is None else _judge(wanted, value) for wanted, value in found)])
            missed += [
                [cell, wanted.title, *_beside(wanted, means)]
                for wanted, value in found
                if wanted.title in _BOUNDS and value is not None and not wanted.holds(value)
            ]
    if not body:
        return []
    lines = ["## Wanted", *table(["cell", *(wanted.title for wanted in WANTED)], body), ""]
    if missed:
        lines += ["## Bounds that are missed", *table(["cell", "bound", "kv_aware", *_OTHERS], missed), ""]
    return lines


def _beside(wanted: Wanted, means: Mapping[str, Row]) -> list[str]:
    """Return the value that every rule has."""
    return [
        _judge(wanted, wanted.value({**means, ON: means[name]}) or 0.0) if name in means else ""
        for name in (ON, *_OTHERS)
    ]


def _judge(wanted: Wanted, value: float) -> str:
    return f"{value:.2f}" if wanted.holds(value) else f"**{value:.2f}**"


def _mean(rows: Rows) -> Row:
    return {name: fmean(row[name] for row in rows) for name, first in rows[0].items() if isinstance(first, float | int)}


def as_markdown(rows: Rows) -> str:
    """Return the report: a table of each shape, its cells as they were run and the policies of each in one order."""
    others = _other_seeds(rows)
    rows = [row for row in rows if row["seed"] == 1]
    cells = list(dict.fromkeys(row["cell"] for row in rows))
    policies = (OFF, ON, *PEERS, "places")
    rows = sorted(rows, key=lambda row: (cells.index(row["cell"]), policies.index(row["policy"].partition("=")[0])))
    shapes = dict.fromkeys(row["cell"].partition("-")[0] for row in rows)
    lines = [HEAD, *_wanted(rows)]
    for shape in shapes:
        of_shape = [row for row in rows if row["cell"].partition("-")[0] == shape]
        lines += [f"## {shape}", *_table(of_shape), ""]
    return "\n".join(lines + others)


#: Figures of which the spread over the seeds is shown, with admission, and over those without.
SPREAD = (
    ("session over off", "session_mean_s", True),
    ("sessions/h over off", "sessions_per_hour", True),
    ("hit", "hit_rate", False),
    ("fair", "fairness", False),
    ("chat 99 % over off", "chat_p99_s", True),
)


def _other_seeds(rows: Rows) -> list[str]:
    """Return what other draws of the same cells come to, seed by seed."""
    found: dict[str, dict[int, dict[str, Row]]] = {}
    for row in rows:
        found.setdefault(row["cell"], {}).setdefault(row["seed"], {})[row["policy"]] = row
    body = []
    for cell, by_seed in found.items():
        pairs = [(runs[ON], runs[OFF]) for _, runs in sorted(by_seed.items()) if ON in runs and OFF in runs]
        if len(pairs) < 2:
            continue
        cells = []
        for _, name, against in SPREAD:
            values = [on[name] / off[name] if against else on[name] for on, off in pairs if name in on]
            cells.append(" ".join(f"{value:.2f}" for value in values))
        body.append([cell, *cells])
    if not body:
        return []
    titles = ["cell", *(title for title, _, _ in SPREAD)]
    return ["## Other draws", "", "Seeds 1, 2 and so on.", *table(titles, body), ""]


def _describe(more: str) -> str:
    """Return the end of a cell's name in words."""
    size, _, speed = more.partition("x")
    return f"host {size} times at {speed} GB/s" if speed else f"one {more}"


def _table(rows: Rows) -> list[str]:
    columns = COLUMNS + (CHAT if any("chat_p99_s" in row for row in rows) else ())
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["cell"], row["policy"].partition("=")[0]), []).append(row)
    body = []
    for (cell, _), runs in groups.items():
        engines, _, *more = cell.split("-")[1:]
        cells = [form.format(fmean(run[name] for run in runs)) for _, name, form in columns]
        about = ", ".join([f"{engines} engines", f"{runs[0]['agents']} agents", *map(_describe, more)])
        names = ", ".join(dict.fromkeys(run["policy"] for run in runs))
        body.append([about, f"{fmean(run['needed'] for run in runs):.1f}", names, *cells])
    return table(["", "needs", "policy", *(title for title, _, _ in columns)], body)
