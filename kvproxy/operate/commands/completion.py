"""`kvproxy completion`: scripts for bash, zsh and fish, made from the command line's own parser."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass

SHELLS = ("bash", "zsh", "fish")
#: Metavars of file arguments.
_FILES = {"FILE", "PATH"}


@dataclass(frozen=True, slots=True)
class Option:
    """One option or word: its spellings, what it is for, and what may follow it."""

    names: tuple[str, ...]
    help: str
    takes: str = ""
    choices: tuple[str, ...] = ()

    @property
    def files(self) -> bool:
        """True if a file follows."""
        return self.takes in _FILES


@dataclass(frozen=True, slots=True)
class Command:
    """A command with its options and arguments."""

    name: str
    help: str
    options: tuple[Option, ...]
    arguments: tuple[Option, ...]

    @property
    def words(self) -> list[str]:
        """Words that may follow the command."""
        return [name for option in self.options for name in option.names] + [
            choice for argument in self.arguments for choice in argument.choices
        ]

    @property
    def files(self) -> bool:
        """True if an argument is a file."""
        return any(argument.files for argument in self.arguments)


def main(args: argparse.Namespace) -> int:
    """`kvproxy completion`; `args.parser` is the whole command line's."""
    sys.stdout.write(write_script(args.shell, args.parser))
    return 0


def write_script(shell: str, parser: argparse.ArgumentParser) -> str:
    """Return the completion script of one of SHELLS."""
    found = list(list_commands(parser))
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](found)


def list_commands(parser: argparse.ArgumentParser) -> Iterator[Command]:
    """Every command of the parser."""
    for action in parser._actions:
        if not isinstance(action, argparse._SubParsersAction):
            continue
        helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
        for name, sub in action.choices.items():
            if name not in helps:
                continue  # started by kvproxy itself
            found = [(each, _option(each)) for each in sub._actions]
            options = tuple(option for each, option in found if each.option_strings)
            arguments = tuple(option for each, option in found if not each.option_strings)
            yield Command(name, helps.get(name, ""), options, arguments)


def _option(action: argparse.Action) -> Option:
    takes = "" if action.nargs == 0 else str(action.metavar or action.dest.upper())
    text = (action.help or "").replace("%(default)s", str(action.default)).replace("%%", "%")
    choices = tuple(str(choice) for choice in action.choices) if action.choices else ()
    return Option(tuple(action.option_strings), text, takes, choices)


def _bash(found: list[Command]) -> str:
    cases = "\n".join(
        f"    {command.name}) words={_quoted(' '.join(command.words))}; files={int(command.files)} ;;"
        for command in found
    )
    first = _quoted(" ".join(["--help", "--version", *(command.name for command in found)]))
    after = [
        f'"{command.name} {name}"'
        for command in found
        for option in command.options
        if option.files
        for name in option.names
    ]
    return f"""\
# kvproxy completion bash: put `eval "$(kvproxy completion bash)"` into ~/.bashrc
_kvproxy() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} words files=0
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W {first} -- "$word"))
    return
  fi
  case "${{COMP_WORDS[1]}} $before" in
    {"|".join(after)}) COMPREPLY=($(compgen -f -- "$word")); return ;;
  esac
  case "${{COMP_WORDS[1]}}" in
{cases}
  esac
  COMPREPLY=($(compgen -W "$words" -- "$word"))
  if [ "$files" = 1 ]; then COMPREPLY+=($(compgen -f -- "$word")); fi
}}
complete -o filenames -F _kvproxy kvproxy
"""


def _zsh(found: list[Command]) -> str:
    named = "\n".join(f"    {_quoted(f'{one.name}:{one.help}')}" for one in found)
    cases = "\n".join(f"    {one.name}) _arguments {' '.join(_zsh_arguments(one))} ;;" for one in found)
    return f"""\
#compdef kvproxy
# kvproxy completion zsh: put `source <(kvproxy completion zsh)` into ~/.zshrc, after compinit
_kvproxy() {{
  local -a names
  names=(
{named}
  )
  if (( CURRENT == 2 )); then _describe command names; return; fi
  local name=$words[2]
  shift words; (( CURRENT-- ))
  case $name in
{cases}
  esac
}}
compdef _kvproxy kvproxy
"""


def _zsh_arguments(command: Command) -> Iterator[str]:
    yield from map(_zsh_option, command.options)
    yield from map(_zsh_argument, command.arguments)


def _zsh_option(option: Option) -> str:
    takes = f":{_zsh_label(option)}:{_zsh_values(option)}" if option.takes else ""
    about = option.help.replace("[", "(").replace("]", ")")
    return " ".join(_quoted(f"*{name}[{about}]{takes}") for name in option.names)


def _zsh_argument(option: Option) -> str:
    return _quoted(f"*:{_zsh_label(option)}:{_zsh_values(option)}")


def _zsh_label(option: Option) -> str:
    return option.takes.replace(":", "\\:")


def _zsh_values(option: Option) -> str:
    return "_files" if option.files else f"({' '.join(option.choices)})" if option.choices else ""


def _fish(found: list[Command]) -> str:
    lines = [
        "# kvproxy completion fish: kvproxy completion fish > ~/.config/fish/completions/kvproxy.fish",
        "complete -c kvproxy -f",
    ]
    for one in found:
        lines.append(f"complete -c kvproxy -n __fish_use_subcommand -a {one.name} -d {_quoted(one.help)}")
        here = f"complete -c kvproxy -n '__fish_seen_subcommand_from {one.name}'"
        for option in one.options:
            names = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names)
            takes = "" if not option.takes else " -r -F" if option.files else " -x"
            if option.choices:
                takes += f" -a {_quoted(' '.join(option.choices))}"
            lines.append(f"{here} {names}{takes} -d {_quoted(option.help)}")
        for argument in one.arguments:
            values = (
                " -F" if argument.files else f" -a {_quoted(' '.join(argument.choices))}" if argument.choices else ""
            )
            if values:
                lines.append(f"{here}{values}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
