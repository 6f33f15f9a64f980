"""`kvproxy doctor`: visits the configured engines and LMCache and says what is wrong and how to fix it; or says what
the traffic does to prefixes (`--traffic`), or which settings would help it (`--advise`)."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import httpx

from kvproxy.base.errors import ConfigError, Problem
from kvproxy.base.settings.model import parse_duration_s
from kvproxy.features.hygiene.traffic import rows_of, rows_of_receipts, traffic_report
from kvproxy.lab.advise import report as advice_report
from kvproxy.lab.advise.adviser import Adviser
from kvproxy.lab.advise.engines import EngineSettingsSeen, ask_engines
from kvproxy.lab.replay.command import INTERRUPTED
from kvproxy.operate.commands.configuration import named_file
from kvproxy.operate.commands.operate import AdminAddress, AdminRefused, ask_admin
from kvproxy.operate.commands.serving import run_loop
from kvproxy.operate.config.load import check_config, load_endpoints
from kvproxy.operate.config.schema import Config
from kvproxy.operate.doctor.check_configuration import convert_problems
from kvproxy.operate.doctor.report import DoctorReport, print_json, print_table
from kvproxy.operate.doctor.tools import Tools, VisitTimeouts, utc_seconds
from kvproxy.operate.doctor.visit import diagnose_setup
from kvproxy.operate.receipts.files import ReceiptReader
from kvproxy.proxy.filters.registry import discover

#: As a nice program, to leave the processor to others.
_NICE = 10


@dataclass(frozen=True, slots=True)
class DoctorOptions:
    """What the command line asks for."""

    path: str | None
    endpoints: Sequence[str] = ()
    timeout: str = "5s"
    as_json: bool = False
    strict: bool = False
    lenient: bool = False
    verbose: bool = False
    advise: bool = False
    budget: str = "60s"
    receipts: Path | None = None


@dataclass(frozen=True, slots=True)
class TrafficOptions:
    """Of `--traffic`: the running proxy to ask, or the receipts to read instead."""

    address: AdminAddress
    receipts: Path | None = None
    as_json: bool = False
    strict: bool = False


def main(args: argparse.Namespace) -> int:
    """`kvproxy doctor`."""
    if args.traffic:
        address = AdminAddress(args.url, args.token_file)
        asked = TrafficOptions(address, args.receipts, args.json, args.strict)
        return print_traffic(asked, out=sys.stdout, err=sys.stderr)
    options = DoctorOptions(
        named_file(args), args.endpoint, args.timeout, args.json, args.strict, args.lenient, args.verbose,
        advise=args.advise, budget=args.advise_budget, receipts=args.receipts,
    )  # fmt: skip
    if options.advise:
        os.nice(_NICE)  # it often runs beside the proxy
        return print_advice(options, out=sys.stdout, err=sys.stderr)
    return run(options, out=sys.stdout, err=sys.stderr)


def run(options: DoctorOptions, *, out: TextIO, err: TextIO) -> int:
    """Print the verdict; 0 fine, 1 problems, 2 only warnings with `strict`. Raises ConfigError for a wrong command."""
    timeout_s = _duration_s("--timeout", options.timeout)
    config, problems = load_configuration(options)

    async def visit() -> int:
        report = await diagnose_setup(config, problems, tools=Tools(timeouts=VisitTimeouts(exchange_s=timeout_s)))
        _print(report, out, as_json=options.as_json, verbose=options.verbose)
        return report.exit_status(strict=options.strict)

    if config is not None:
        engines = sum(len(cluster.endpoints) for cluster in config.clusters.values())
        print(f"visiting {engines} engine(s); each gets two or three requests of one token (max_tokens 1)", file=err)
    return run_loop(visit)


def print_advice(options: DoctorOptions, *, out: TextIO, err: TextIO) -> int:
    """Print advice; 0, 1 when the configuration has errors, 130 when Ctrl-C ended it early."""
    timeout_s, budget_s = _duration_s("--timeout", options.timeout), _budget_s(options.budget)
    config, problems = load_configuration(options)
    if config is None:
        print_table(DoctorReport.of_findings(convert_problems(problems)), out)
        return 1
    tools = Tools(timeouts=VisitTimeouts(exchange_s=timeout_s))
    engines: list[EngineSettingsSeen] = []

    async def visit() -> int:
        engines.extend(await ask_engines(config, tools=tools))
        return 0

    run_loop(visit)
    path = options.receipts or (Path(config.receipts.path) if config.receipts.path else None)
    adviser = Adviser(config, engines, path, budget_s=budget_s, now=utc_seconds(), err=err)
    pools = adviser.advise()
    if options.as_json:
        advice_report.print_json(pools, adviser.notes, out, now=adviser.now)
    else:
        width, colour = shutil.get_terminal_size().columns, out.isatty() and "NO_COLOR" not in os.environ
        advice_report.print_text(pools, adviser.notes, out, now=adviser.now, width=width, colour=colour)
    return INTERRUPTED if adviser.interrupted else 0


def print_traffic(
    options: TrafficOptions, *, out: TextIO, err: TextIO, transport: httpx.BaseTransport | None = None
) -> int:
    """Print what breaks prefixes; 0, 1 when there is nothing to read, 2 for warnings with `strict`."""
    try:
        if options.receipts is not None:
            rows, returned = rows_of_receipts(ReceiptReader(options.receipts).oldest_first())
        else:
            with options.address.connect(transport=transport) as client:
                answer = ask_admin(client, options.address.url, "/cache/breaks")
            rows, returned = rows_of(answer), answer["returned"]
    except (AdminRefused, OSError) as error:
        print(f"kvproxy doctor --traffic: {error}", file=err)
        return 1
    report = traffic_report(rows, returned)
    _print(report, out, as_json=options.as_json, verbose=True)
    return report.exit_status(strict=options.strict)


def _print(report: DoctorReport, out: TextIO, *, as_json: bool, verbose: bool) -> None:
    if as_json:
        print_json(report, out)
    else:
        width, colour = shutil.get_terminal_size().columns, out.isatty() and "NO_COLOR" not in os.environ
        print_table(report, out, width=width, colour=colour, verbose=verbose)


def load_configuration(options: DoctorOptions) -> tuple[Config | None, list[Problem]]:
    """The configuration, None when it has errors, and what is wrong with it. Raises ConfigError when none is named."""
    if (options.path is None) == (not options.endpoints):
        hint = "`kvproxy init` writes a config.yaml"
        raise ConfigError([Problem("", "give either -c FILE, or --endpoint ID=URL once per engine", hint)])
    if options.path is None:
        try:
            return load_endpoints(options.endpoints, host="127.0.0.1", port=8888), []
        except ConfigError as error:
            return None, error.problems
    extra = {name: kind.settings for name, kind in discover().items()}
    return check_config(Path(options.path), extra_filters=extra, lenient=options.lenient)


def _duration_s(option: str, text: str) -> float:
    seconds = _budget_s(text, option)
    if seconds <= 0:
        raise ConfigError([Problem(option, "must be longer than 0")])
    return seconds


def _budget_s(text: str, option: str = "--advise-budget") -> float:
    try:
        return parse_duration_s(text)
    except ValueError as error:
        raise ConfigError([Problem(option, str(error))]) from None
