"""`kvproxy check`: every problem of a configuration at once."""

from __future__ import annotations

import json
from typing import TextIO

from kvproxy.config.json_schema import file_schema
from kvproxy.config.load import check_file
from kvproxy.filters.registry import discover


def run(path: str, *, lenient: bool, out: TextIO) -> int:
    """Print what is wrong; 0 when the file can be served, 1 when not."""
    extra = {name: kind.settings for name, kind in discover().items()}
    config, problems = check_file(path, extra_filters=extra, lenient=lenient)
    for problem in problems:
        print(f"{problem.severity}: {problem}", file=out)
    errors = sum(problem.severity == "error" for problem in problems)
    if config is None or errors:
        print(f"{path}: {errors} error{'s' if errors != 1 else ''}", file=out)
        return 1
    count = sum(len(cluster.endpoints) for cluster in config.clusters.values())
    print(f"{path}: good ({len(config.clusters)} cluster(s), {count} static endpoint(s))", file=out)
    return 0


def print_schema(out: TextIO) -> int:
    """Print the JSON Schema of the native dialect, for editors."""
    print(json.dumps(file_schema(), indent=2), file=out)
    return 0
