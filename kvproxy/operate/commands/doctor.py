"""`kvproxy doctor`: visits the configured engines and LMCache and reports what is wrong, with the fix.

`--traffic` and `--advise` are commands of their own, which `cli.py` names.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from kvproxy.base.errors import ConfigError, Problem
from kvproxy.base.settings.model import parse_duration_s
from kvproxy.operate.capabilities import list_gains
from kvproxy.operate.commands.configuration import named_engines, named_file
from kvproxy.operate.commands.serving import run_loop
from kvproxy.operate.commands.survey import survey_engines
from kvproxy.operate.config.load import check_config
from kvproxy.operate.config.schema import Config
from kvproxy.operate.doctor.checks import diagnose_setup
from kvproxy.operate.doctor.report import DoctorReport, print_json, print_table
from kvproxy.operate.doctor.tools import Tools, VisitTimeouts
from kvproxy.operate.filter_plugins import discover


@dataclass(frozen=True, slots=True)
class DoctorOptions:
    """Options of the command."""

    path: str | None
    endpoints: Sequence[str] = ()
    timeout: str = "5s"
    as_json: bool = False
    strict: bool = False
    lenient: bool = False
    verbose: bool = False
    budget: str = "60s"
    receipts: Path | None = None


def main(args: argparse.Namespace) -> int:
    """`kvproxy doctor`."""
    return run(read_options(args), out=sys.stdout, err=sys.stderr)


def read_options(args: argparse.Namespace) -> DoctorOptions:
    """Return what the command line asks for."""
    return DoctorOptions(
        named_file(args),
        named_engines(args),
        args.timeout,
        args.json,
        args.strict,
        args.lenient,
        args.verbose,
        budget=args.advise_budget,
        receipts=args.receipts,
    )


def run(options: DoctorOptions, *, out: TextIO, err: TextIO) -> int:
    """Print the verdict; 0 fine, 1 problems, 2 only warnings with `strict`. Raises ConfigError for a wrong command."""
    timeout_s = duration_of("--timeout", options.timeout)
    config, problems = load_configuration(options)

    async def visit() -> int:
        report = await diagnose_setup(config, problems, tools=Tools(timeouts=VisitTimeouts(exchange_s=timeout_s)))
        print_report(report, out, as_json=options.as_json, verbose=options.verbose)
        if config is not None and not options.as_json:
            print(*list_gains(config), sep="\n", file=out)
        return report.exit_status(strict=options.strict)

    if config is not None:
        engines = sum(len(cluster.endpoints) for cluster in config.clusters.values())
        print(f"visiting {engines} engine(s); each gets two or three requests of one token (max_tokens 1)", file=err)
    return run_loop(visit)


def print_report(report: DoctorReport, out: TextIO, *, as_json: bool, verbose: bool) -> None:
    """Print a report as a table or as JSON."""
    if as_json:
        print_json(report, out)
    else:
        width = shutil.get_terminal_size().columns
        colour = out.isatty() and "NO_COLOR" not in os.environ
        print_table(report, out, width=width, colour=colour, verbose=verbose)


def load_configuration(options: DoctorOptions) -> tuple[Config | None, list[Problem]]:
    """Return the configuration, None when it has errors, and what is wrong with it. Raises ConfigError when none is
    named."""
    if (options.path is None) == (not options.endpoints):
        hint = "`kvproxy init` writes a config.yaml"
        raise ConfigError([Problem("", "give either -c FILE, or the engines' URLs", hint)])
    if options.path is None:
        try:
            return survey_engines(options.endpoints, listen="127.0.0.1:8888", policy="kv_aware")[0], []
        except ConfigError as error:
            return None, error.problems
    extra = {name: kind.settings for name, kind in discover().items()}
    return check_config(Path(options.path), extra_filters=extra, lenient=options.lenient)


def duration_of(option: str, text: str) -> float:
    """Return seconds, more than 0. Raises ConfigError."""
    seconds = budget_of(text, option)
    if seconds <= 0:
        raise ConfigError([Problem(option, "must be longer than 0")])
    return seconds


def budget_of(text: str, option: str = "--advise-budget") -> float:
    """Return seconds, 0 or more. Raises ConfigError."""
    try:
        return parse_duration_s(text)
    except ValueError as error:
        raise ConfigError([Problem(option, str(error))]) from None
