"""The report of benchmarks/agents.py."""

from __future__ import annotations

import json
import os
import shlex
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.report import about

_HEAD = """# Predicted and reused tokens: agents and chats on a real vLLM

`{command}`

Two vLLM 0.32.0 servers (CPU build, the tiny model, {how}), policy `kv_aware`, {sessions} sessions of {turns} turns for
each kind of client. Claude Code: `/v1/messages` with a new billing header on every request, marks that roll, six tools,
a sub-agent with a prompt of its own at every third turn and a fork of the session at every fourth. Codex:
`/v1/responses` with all of its history, a function and a tool of free text. Chat: `/v1/chat/completions`.

*Predicted* is what was expected to be reused at the endpoint that was chosen, *reused* the engine's own
`cached_tokens`. *Off by* is the distance between both in a request, as a share of its prompt. A later turn is any
request but a session's first. {before}

{machine}

"""
_COLUMNS = (
    *("client", "source", "version", "requests", "reused of all prompts", "predicted / reused", "off by, median"),
    *("off by, 90 %", "later turns within 5 %", "predicted by"),
)
_TAIL = """
First turns of two sessions run at once, so what the other one is about to leave is taken for reused. This template
prints a chat's tools after its system prompt, where the text index has them before. KV events are not asked on a first
turn, whose tokens are not known yet.

The model is random, so that its answers seldom come back as the tokens that it wrote, and count for nothing here; a
trained model reuses those too, which neither source predicts before the answer was part of a prompt.
"""


class Report:
    """`agents.md` and `agents.json` in `folder`, written again with each run."""

    def __init__(self, folder: Path, *, shape: Mapping[str, int], before: str, how: str, resume: bool) -> None:
        self._folder = folder
        said = [Path(each).name if each.startswith("/") else each for each in sys.argv[1:]]  # no paths of a machine
        self._said = about(os.cpu_count() or 1, shlex.join(["python", "-m", "benchmarks.agents", *said]))
        self._words: dict[str, Any] = {**shape, "before": before, "how": how, "command": self._said["command"]}
        known = folder / "agents.json"
        self._runs: list[dict[str, Any]] = json.loads(known.read_text())["runs"] if resume and known.exists() else []

    def has(self, kind: str, source: str, version: str) -> bool:
        """Return True if that was run."""
        return any((run["kind"], run["source"], run["version"]) == (kind, source, version) for run in self._runs)

    def add(self, run: dict[str, Any]) -> None:
        """One more."""
        self._runs.append(run)
        self.write()

    def write(self) -> None:
        """All there is."""
        order = {name: place for place, name in enumerate(("before", "after"))}
        kinds = [run["kind"] for run in self._runs]
        self._runs.sort(key=lambda one: (kinds.index(one["kind"]), one["source"] == "KV events", order[one["version"]]))
        rows = [f"| {' | '.join(_COLUMNS)} |", f"|{'---|' * len(_COLUMNS)}", *map(_row, self._runs)]
        machine = ", ".join(f"{name}: {value}" for name, value in self._said.items() if name != "command")
        rows += ["", "Predicted / reused by turn of the session, and of the agents that it started:", ""]
        turns = range(1, self._words["turns"] + 1)
        rows += [f"| client | source | version | {' | '.join(map(str, turns))} | sub-agents | forks |"]
        rows += [f"|{'---|' * (5 + len(turns))}", *(_by_turn(run, turns) for run in self._runs)]
        words = _HEAD.format(machine=machine, **self._words) + "\n".join(rows) + "\n" + _TAIL
        (self._folder / "agents.md").write_text(words)
        (self._folder / "agents.json").write_text(json.dumps({**self._said, "runs": self._runs}) + "\n")


def _row(run: Mapping[str, Any]) -> str:
    requests = run["requests"]
    predicted, cached, prompt = (sum(one[name] for one in requests) for name in ("predicted", "cached", "prompt"))
    off = sorted(abs(one["predicted"] - one["cached"]) / one["prompt"] for one in requests)
    later = [one for one in requests if one["turn"] > 1 or one["agent"]]
    close = sum(abs(one["predicted"] - one["cached"]) <= 0.05 * one["cached"] for one in later)
    by = {one["source"] for one in requests if one["source"]}
    cells = [
        run["kind"],
        run["source"],
        run["version"],
        str(len(requests)),
        f"{cached / prompt:.1%}",
        f"{predicted / cached:.3f}" if cached else "-",
        f"{statistics.median(off):.1%}",
        f"{off[int(0.9 * (len(off) - 1))]:.1%}",
        f"{close / len(later):.0%}",
        ", ".join(sorted(by)) or "-",
    ]
    return f"| {' | '.join(cells)} |"


def _by_turn(run: Mapping[str, Any], turns: range) -> str:
    groups = [[one for one in run["requests"] if not one["agent"] and one["turn"] == turn] for turn in turns]
    groups += [[one for one in run["requests"] if one["agent"].startswith(kind)] for kind in ("sub", "fork")]
    cells = []
    for group in groups:
        predicted, cached = (sum(one[name] for one in group) for name in ("predicted", "cached"))
        cells.append(f"{predicted / cached:.2f}" if cached else "-")
    return f"| {' | '.join([run['kind'], run['source'], run['version'], *cells])} |"
