"""`kvproxy doctor --advise`: the settings that would help the recorded traffic."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path
from typing import TextIO

from kvproxy.base.types import utc_seconds
from kvproxy.lab.advise import report as advice_report
from kvproxy.lab.advise.adviser import Adviser
from kvproxy.lab.advise.engines import EngineSettingsSeen, ask_engines
from kvproxy.lab.replay.command import INTERRUPTED
from kvproxy.operate.commands.doctor import DoctorOptions, budget_of, duration_of, load_configuration, read_options
from kvproxy.operate.commands.serving import run_loop
from kvproxy.operate.doctor.check_configuration import convert_problems
from kvproxy.operate.doctor.report import DoctorReport, print_table
from kvproxy.operate.doctor.tools import Tools, VisitTimeouts

#: As a nice program, to leave the processor to others.
_NICE = 10


def main(args: argparse.Namespace) -> int:
    """`kvproxy doctor --advise`."""
    os.nice(_NICE)  # it often runs beside the proxy
    return print_advice(read_options(args), out=sys.stdout, err=sys.stderr)


def print_advice(options: DoctorOptions, *, out: TextIO, err: TextIO) -> int:
    """Print advice; 0, 1 when the configuration has errors, 130 when Ctrl-C ended it early."""
    timeout_s = duration_of("--timeout", options.timeout)
    budget_s = budget_of(options.budget)
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
        width = shutil.get_terminal_size().columns
        colour = out.isatty() and "NO_COLOR" not in os.environ
        advice_report.print_text(pools, adviser.notes, out, now=adviser.now, width=width, colour=colour)
    return INTERRUPTED if adviser.interrupted else 0
