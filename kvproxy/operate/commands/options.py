"""Commands of features, and options that several commands share. Every `--help` reads it: it imports argparse alone."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any, NamedTuple


class Command(NamedTuple):
    """A command that a feature adds: one of `COMMANDS` in its module `options`."""

    name: str
    group: str  # a heading of the help
    help: str
    examples: Sequence[str]
    add_options: Callable[[argparse.ArgumentParser], None]
    run: str  # `module:function`, imported when the command is called
    description: str | None = None


class Option(NamedTuple):
    """A row of a table of options. `default` gives the type as well; a type alone: there is no default."""

    flag: str
    metavar: str | None
    default: Any
    help: str
    parse: Callable[[str], object] | None = None  # instead of the type


def add_options(parser: argparse._ActionsContainer, options: Iterable[Option]) -> None:
    """Add options that take a value, or, with the default False, none."""
    for flag, metavar, default, text, parse in options:
        if default is False:
            parser.add_argument(flag, action="store_true", help=text)
            continue
        kind, default = (default, None) if isinstance(default, type) else (type(default), default)
        choices = list(kind) if issubclass(kind, Enum) else None
        parser.add_argument(flag, type=parse or kind, default=default, metavar=metavar, choices=choices, help=text)


def add_config_option(parser: argparse.ArgumentParser) -> None:
    """Add `--config` and `--lenient`."""
    parser.add_argument(
        "-c",
        "--config",
        metavar="FILE",
        help="configuration, native or Pixiu's (else $KVPROXY_CONFIG or ./config.yaml)",
    )
    add_lenient_option(parser)


def add_lenient_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lenient", action="store_true", help="warn about unknown keys of a Pixiu file instead of failing"
    )


def add_admin_options(parser: argparse._ActionsContainer) -> None:
    """Add `--url` and `--token-file` of a running proxy."""
    parser.add_argument("--url", default="http://127.0.0.1:8889", help="its admin listener (default %(default)s)")
    parser.add_argument("--token-file", metavar="FILE", help="file with the admin token (else $KVPROXY_ADMIN_TOKEN)")


def add_engine_arguments(command: argparse.ArgumentParser) -> None:
    """Add engines on the command line, instead of a file."""
    command.add_argument("engines", nargs="*", metavar="URL", help="engines, instead of a file; also ID=URL")
    command.add_argument("--endpoint", action="append", default=[], metavar="ID=URL", help="the same, once per engine")


def parse_count(text: str) -> int:
    """Return a whole number from 1 to 1000."""
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:6]) <= 1000 or len(text) > 4:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 to 1000, not {text!r}")
    return int(text)
