"""The report of `benchmarks.sessions`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from benchmarks.markdown import table

Rows = Sequence[Mapping[str, Any]]

HEAD = """# Sessions beyond the engines' memory

`python -m benchmarks.sessions`

Batches of agents, all begun within 20 s, each played once in virtual time; engines as vLLM sets itself up on an H100
with 20,000 tokens of prefill a second. *agents*: engines of 400,000 tokens, a common system prompt of 8,192 tokens, 6
to 70 turns, contexts of 12,000 to 130,000 tokens, 86 % of the gaps under a second. *mixed*: as many requests of chats
beside them. *cc*, *agent*: sessions of those traces. *forks*: every second agent begins with the middle of another
one's context. *paused*: a human looks at every tenth answer. *giant*: one session in sixteen begins with 200,000
tokens. *lost*: the last engine goes in the middle. *needs*: the contexts over the memory, what several share counted
once.

`thunderagent` and `vllm_router` are those schedulers' rules, with the engines' true memory and speeds and every
session's end known to them; `places=N`, with the best N, admits N sessions on each engine to their end. `kv_aware`
knows no session. Sessions an hour; s from a session's start to its last answer; TTFT of first requests, 90 %; the
longest until an engine admitted a request; share of prompt tokens found in cache; Jain's index of the sessions'
slowdowns against their time alone; correlation of a request's wait with its prompt's length. Chat: TTFT.
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


def as_markdown(rows: Rows) -> str:
    """Return the report: a table of each shape."""
    shapes = dict.fromkeys(row["cell"].partition("-")[0] for row in rows)
    lines = [HEAD]
    for shape in shapes:
        of_shape = [row for row in rows if row["cell"].partition("-")[0] == shape]
        lines += [f"## {shape}", *_table(of_shape), ""]
    return "\n".join(lines)


def _table(rows: Rows) -> list[str]:
    columns = COLUMNS + (CHAT if any("chat_p99_s" in row for row in rows) else ())
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["cell"], row["policy"].partition("=")[0]), []).append(row)
    body = []
    for (cell, _), runs in groups.items():
        engines, _, *lost = cell.split("-")[1:]
        cells = [form.format(fmean(run[name] for run in runs)) for _, name, form in columns]
        about = f"{engines} engines, {runs[0]['agents']} agents" + (", one lost" if lost else "")
        names = ", ".join(dict.fromkeys(run["policy"] for run in runs))
        body.append([about, f"{fmean(run['needed'] for run in runs):.1f}", names, *cells])
    return table(["", "needs", "policy", *(title for title, _, _ in columns)], body)
