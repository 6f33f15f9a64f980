"""The help of the command line: commands in groups, examples for each, and the usual options of one that has many."""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence

#: Every command of the core, in the order of a first day with it; features add theirs to a group.
GROUPS: Mapping[str, Sequence[str]] = {
    "Start": ("init", "serve", "demo", "simulate"),
    "Look": ("status", "explain", "doctor", "check"),
    "Operate": ("drain", "undrain", "reload"),
    "Study": ("replay", "plan"),
    "Gateways and shells": ("completion",),
}
EXAMPLES: Mapping[str, Sequence[str]] = {
    "init": (
        "kvproxy init --engine http://10.0.0.1:8000 --engine http://10.0.0.2:8000",
        "kvproxy init --yes --engine a=http://127.0.0.1:8000 --lmcache http://127.0.0.1:9000",
    ),
    "serve": (
        "kvproxy serve -c config.yaml",
        "kvproxy serve http://10.0.0.1:8000 http://10.0.0.2:8000",
        "kvproxy serve -c config.yaml --workers 4",
    ),
    "demo": ("kvproxy demo", "kvproxy demo --stay", "kvproxy demo --tiers", "kvproxy demo --kill-an-engine"),
    "simulate": (
        "kvproxy simulate --engines 4 --port 8000 --lmcache 9000 --kv-events",
        "kvproxy simulate -c config.yaml -o simulated.yaml",
        "kvproxy simulate --fault sim-1:stall_first_byte_s=2",
    ),
    "status": ("kvproxy status --watch", "kvproxy status --url http://10.0.0.7:8889 --token-file token"),
    "explain": ("kvproxy explain 65053d07677c", "kvproxy explain 65053d07677c --file /var/log/kvproxy/receipts.jsonl"),
    "doctor": (
        "kvproxy doctor -c config.yaml",
        "kvproxy doctor --traffic",
        "kvproxy doctor --advise --receipts receipts.jsonl",
    ),
    "check": ("kvproxy check config.yaml", "kvproxy check --schema > schema.json"),
    "drain": ("kvproxy drain engine-1 --wait",),
    "undrain": ("kvproxy undrain engine-1",),
    "reload": ("kvproxy reload",),
    "replay": (
        "kvproxy replay trace.jsonl --instances 4",
        "kvproxy replay trace.jsonl --policy round_robin,kv_aware,kv_aware+queue --load 0.9 --plot out.html",
        "kvproxy replay trace.jsonl --url http://127.0.0.1:8888",
    ),
    "plan": (
        "kvproxy plan --model meta-llama/Llama-3.1-8B --gpu 80GiB",
        "kvproxy plan --model meta-llama/Llama-3.1-8B --gpu 80GiB --host 256GiB --trace trace.jsonl",
        "kvproxy plan --model ./config.json --tp 4 --trace trace.jsonl --want-hit 0.6",
    ),
    "completion": ('eval "$(kvproxy completion bash)"',),
}
#: Options that `--help` shows of commands with very many; `--help-all` shows all.
USUAL: Mapping[str, frozenset[str]] = {
    "replay": frozenset(
        (
            "trace",
            "receipts",
            "scenario",
            "policy",
            "baseline",
            "instances",
            "load",
            "once",
            "seeds",
            "requests",
            "json",
            "plot",
        )
    )
    | {"engine", "url"},
    "plan": frozenset(
        ("model", "gpu", "tp", "dtype", "host", "context", "json", "trace", "policy", "want_hit", "want_ttft", "plot")
    ),
}


class GroupedHelp(argparse.HelpFormatter):
    """Commands under headings; indented lines of a text stay as they are."""

    def _format_action(self, action: argparse.Action) -> str:
        if not isinstance(action, argparse._SubParsersAction):
            return super()._format_action(action)
        choices = {one.dest: one for one in action._choices_actions}
        added = {name: parser.get_default("group") for name, parser in action.choices.items()}
        titles = dict.fromkeys((*GROUPS, *(group for group in added.values() if group)))
        groups = {
            title: [*GROUPS.get(title, ()), *(name for name, group in added.items() if group == title)]
            for title in titles
        }
        return "\n".join(
            self._format_group(title, [choices[name] for name in names if name in choices])
            for title, names in groups.items()
        )

    def _format_group(self, title: str, choices: Sequence[argparse.Action]) -> str:
        lines = [f"{'':{self._current_indent}}{title}\n"]
        self._indent()
        lines += [super(GroupedHelp, self)._format_action(one) for one in choices]
        self._dedent()
        return "".join(lines)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = re.split(r"\n(?= *\S)", text)
        return "\n".join(one if one.startswith("  ") else textwrap.fill(one, width) for one in paragraphs)


def add_examples(name: str, parser: argparse.ArgumentParser, lines: Sequence[str]) -> None:
    """Examples of a command: before its options if these are many, else after them."""
    shown = "\n".join(["examples:", *(f"  {line}" for line in lines)])
    if name in USUAL:
        parser.description = f"{shown}\n\n{parser.description or ''}".rstrip()
    else:
        parser.epilog = shown


class HelpAll(argparse.Action):
    """`--help-all`: every option of a command whose `--help` shows the usual ones."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """Print it, and end."""
        parser.set_defaults(shows_all=True)
        parser.print_help()
        parser.exit()


@contextlib.contextmanager
def hide_options(name: str, parser: argparse.ArgumentParser) -> Iterator[None]:
    """Within it the parser has no help for options that `--help` leaves out, nor text for groups without any other."""
    usual = USUAL.get(name)
    if usual is None or parser.get_default("shows_all"):
        yield
        return
    hidden = [one for one in parser._actions if one.dest not in usual | {"help", "help_all"}]
    empty = [group for group in parser._action_groups if all(one in hidden for one in group._group_actions)]
    helps = [one.help for one in hidden]
    descriptions = [group.description for group in empty]
    try:
        for action in hidden:
            action.help = argparse.SUPPRESS
        for group in empty:
            group.description = None
        yield
    finally:
        for action, text in zip(hidden, helps, strict=True):
            action.help = text
        for group, text in zip(empty, descriptions, strict=True):
            group.description = text


def main_completion(args: argparse.Namespace) -> int:
    """`kvproxy completion`."""
    from argcomplete.shell_integration import shellcode

    sys.stdout.write(shellcode(["kvproxy"], shell=args.shell))
    return 0
