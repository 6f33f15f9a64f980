"""`kvproxy check`: every problem of a configuration at once, in the order of the file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TextIO

from kvproxy.config.json_schema import file_schema
from kvproxy.config.load import check_config
from kvproxy.errors import Problem
from kvproxy.filters.registry import discover

_COLOURS = {"error": "\x1b[31m", "warning": "\x1b[33m", "note": "\x1b[36m"}


def run(path: str, *, lenient: bool, out: TextIO) -> int:
    """Print what is wrong; 0 when the file can be served, 1 when not."""
    extra = {name: kind.settings for name, kind in discover().items()}
    config, problems = check_config(Path(path), extra_filters=extra, lenient=lenient)
    colour = out.isatty() and "NO_COLOR" not in os.environ
    for problem in problems:
        print(line_of(problem, colour=colour), file=out)
    errors = sum(problem.severity == "error" for problem in problems)
    if config is None or errors:
        print(f"{path}: {errors} error{'s' if errors != 1 else ''}", file=out)
        return 1
    count = sum(len(cluster.endpoints) for cluster in config.clusters.values())
    print(f"{path}: good ({len(config.clusters)} cluster(s), {count} static endpoint(s))", file=out)
    return 0


def line_of(problem: Problem, *, colour: bool = False) -> str:
    """`config.yaml:3:1: error: polcy: unknown key (did you mean 'policy'?)`, as compilers write it."""
    place = f"{problem.place}: " if problem.place else ""
    severity = f"{_COLOURS[problem.severity]}{problem.severity}\x1b[0m" if colour else problem.severity
    return f"{place}{severity}: {problem.located().removeprefix(place).removeprefix('(file): ')}"


def print_schema(out: TextIO) -> int:
    """Print the JSON Schema of the native dialect, for editors."""
    print(json.dumps(file_schema(), indent=2), file=out)
    return 0
