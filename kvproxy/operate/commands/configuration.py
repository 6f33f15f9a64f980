"""Where a configuration comes from (a file, or engines of the command line), and `kvproxy check` of it."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TextIO

from kvproxy.base.errors import ConfigError, Problem
from kvproxy.operate.capabilities import format_capabilities, list_capabilities
from kvproxy.operate.config.load import check_config
from kvproxy.operate.config.schema import Config
from kvproxy.operate.filter_plugins import discover

#: Environment variable with the configuration file, used if the command line names none.
CONFIG_VARIABLE = "KVPROXY_CONFIG"
DEFAULT_FILE = "config.yaml"
_DEFAULT_HOST = "127.0.0.1"
_DEFAULT_PORT = 8888
_COLOURS = {"error": "\x1b[31m", "warning": "\x1b[33m", "note": "\x1b[36m"}


def find_usual_file(err: TextIO, *, env: Mapping[str, str] = os.environ) -> str | None:
    """Return the default file and print its name: `$KVPROXY_CONFIG`, else `./config.yaml`. None: there is none."""
    named = env.get(CONFIG_VARIABLE, "")
    if named:
        print(f"using {named} (from {CONFIG_VARIABLE})", file=err)
        return named
    if not Path(DEFAULT_FILE).is_file():
        return None
    print(f"using ./{DEFAULT_FILE}", file=err)
    return DEFAULT_FILE


def named_file(args: argparse.Namespace) -> str | None:
    """Return the file on the command line, or the usual one when neither a file nor endpoints are named."""
    named: str | None = args.config
    return named if named is not None or named_engines(args) else find_usual_file(sys.stderr)


def named_engines(args: argparse.Namespace) -> list[str]:
    """Return the engines on the command line."""
    return [*args.engines, *args.endpoint]


@dataclass(frozen=True, slots=True)
class ConfigSource:
    """Source of the configuration from the command line; `load` reads it, any number of times."""

    path: str | None = None
    endpoints: Sequence[str] = ()
    host: str | None = None
    port: int | None = None
    policy: str | None = None
    admin: bool = True
    lenient: bool = False
    changes: Mapping[str, object] = field(default_factory=dict)  # keys of the top level that options set

    def load(self) -> tuple[Config, list[Problem]]:
        """Return the configuration, and what is worth saying about it. Raises ConfigError with every error."""
        config, problems = self._read()
        given = {"host": self.host, "port": self.port}
        listen = config.listen.model_copy(update={key: value for key, value in given.items() if value is not None})
        changes: dict[str, object] = {**self.changes, "listen": listen}
        if not self.admin:
            changes["admin"] = config.admin.model_copy(update={"enabled": False})
        return config.model_copy(update=changes), problems

    def _read(self) -> tuple[Config, list[Problem]]:
        if self.path is not None and self.endpoints:
            raise ConfigError([Problem("", "either -c FILE or engines, not both")])
        if self.path is not None:
            extra = {name: kind.settings for name, kind in discover().items()}
            config, problems = check_config(Path(self.path), extra_filters=extra, lenient=self.lenient)
            errors = [problem for problem in problems if problem.severity == "error"]
            if config is None or errors:
                raise ConfigError(errors)
            return config, problems
        if not self.endpoints:
            hint = "give engines (`kvproxy serve http://host:8000 ...`) or -c FILE; `kvproxy init` writes a config.yaml"
            raise ConfigError([Problem("", "nothing to serve", hint)])
        host = self.host or _DEFAULT_HOST
        port = _DEFAULT_PORT if self.port is None else self.port
        listen = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        from kvproxy.operate.commands.survey import survey_engines  # slow to import

        return survey_engines(self.endpoints, listen=listen, policy=self.policy or "kv_aware")


def main_check(args: argparse.Namespace) -> int:
    """`kvproxy check`."""
    if args.schema:
        return print_schema(sys.stdout)
    file = args.file or args.config or find_usual_file(sys.stderr)
    if not file:
        sys.stderr.write("kvproxy check: a FILE (or --schema) is required, there is no ./config.yaml\n")
        return 2
    return check_file(file, lenient=args.lenient, out=sys.stdout)


def check_file(path: str, *, lenient: bool, out: TextIO) -> int:
    """Print what is wrong; 0 when the file can be served, 1 when not."""
    extra = {name: kind.settings for name, kind in discover().items()}
    config, problems = check_config(Path(path), extra_filters=extra, lenient=lenient)
    colour = out.isatty() and "NO_COLOR" not in os.environ
    for problem in problems:
        print(format_problem(problem, colour=colour), file=out)
    errors = sum(problem.severity == "error" for problem in problems)
    if config is None or errors:
        print(f"{path}: {errors} error{'s' if errors != 1 else ''}", file=out)
        return 1
    count = sum(len(cluster.endpoints) for cluster in config.clusters.values())
    print(f"{path}: good ({len(config.clusters)} cluster(s), {count} static endpoint(s))", file=out)
    for line in format_capabilities([asdict(one) for one in list_capabilities(config)]):
        print(f"  {line}", file=out)
    return 0


def format_problem(problem: Problem, *, colour: bool = False) -> str:
    """`config.yaml:3:1: error: polcy: unknown key (did you mean 'policy'?)`, as compilers write it."""
    place = f"{problem.place}: " if problem.place else ""
    severity = f"{_COLOURS[problem.severity]}{problem.severity}\x1b[0m" if colour else problem.severity
    return f"{place}{severity}: {problem.located().removeprefix(place)}"


def print_schema(out: TextIO) -> int:
    """Print the JSON Schema of the native dialect, for editors."""
    from kvproxy.operate.config.reference import file_schema  # slow to import

    print(json.dumps(file_schema(), indent=2), file=out)
    return 0
