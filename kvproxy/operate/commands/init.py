"""`kvproxy init`: asks where the engines are, looks at them, writes a configuration that suits what it saw."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from kvproxy.base.errors import ConfigError, Problem
from kvproxy.base.settings.addresses import url_fault
from kvproxy.cache.clients.engine_metrics import EngineKind
from kvproxy.operate.capabilities import list_gains
from kvproxy.operate.commands.serving import run_loop
from kvproxy.operate.commands.survey import SeenEngine, SeenLmCache, look_at_all, parse_engines, write_config
from kvproxy.operate.config.load import check_config
from kvproxy.operate.doctor.flags import Setting, spell_flag

_DEFAULT_ENGINE = "http://127.0.0.1:8000"
_DEFAULT_LISTEN = "127.0.0.1:8888"
_HEAD = """\
# Written by `kvproxy init`. Every setting: docs/configuration.md. After a change: kvproxy check
"""


@dataclass(frozen=True, slots=True)
class InitOptions:
    """Options of the command; missing ones are prompted for, or defaulted with `yes`."""

    engines: Sequence[str] = ()
    lmcache: str | None = None
    listen: str | None = None
    output: Path = Path("config.yaml")
    yes: bool = False
    force: bool = False


class _Answers:
    """Questions on a terminal; without one, or with --yes, the defaults."""

    def __init__(self, stdin: TextIO, out: TextIO, *, asking: bool) -> None:
        self._stdin = stdin
        self._out = out
        self.asking = asking

    def text(self, question: str, default: str) -> str:
        """One line; the default when it is empty."""
        if not self.asking:
            return default
        print(f"{question} [{default or 'none'}]: ", end="", flush=True, file=self._out)
        line = self._stdin.readline()
        if not line:
            raise KeyboardInterrupt
        return line.strip() or default


def main(args: argparse.Namespace) -> int:
    """`kvproxy init`."""
    options = InitOptions(args.engine, args.lmcache, args.listen, Path(args.output), args.yes, args.force)
    return run(options, stdin=sys.stdin, out=sys.stdout, err=sys.stderr)


def run(options: InitOptions, *, stdin: TextIO, out: TextIO, err: TextIO) -> int:
    """Write the file; 1 when it is not written. Raises ConfigError for addresses that are none."""
    answers = _Answers(stdin, out, asking=stdin.isatty() and not options.yes)
    if not options.engines and not answers.asking and not options.yes:
        hint = "give --engine URL once per engine, or --yes for one at http://127.0.0.1:8000"
        raise ConfigError([Problem("", "there is no terminal to ask", hint)])
    if options.output.exists() and not options.force:
        replace = answers.text(f"{options.output} exists. Replace it? y or n", "n")
        if replace.casefold() not in ("y", "yes"):
            how = "--force replaces it, -o FILE writes another"
            print(f"kvproxy init: {options.output} exists and stays as it is ({how})", file=err)
            return 1
    given = options.engines or answers.text("Engines, as URLs with spaces between", _DEFAULT_ENGINE).split()
    engines = dict(parse_engines(given))
    asked = options.lmcache is None and answers.asking
    lmcache = answers.text("LMCache controller or coordinator, as a URL", "") if asked else options.lmcache or ""
    if lmcache and (fault := url_fault(lmcache)):
        raise ConfigError([Problem("--lmcache", fault)])
    listen = options.listen or answers.text("Where clients connect", _DEFAULT_LISTEN)
    return _finish(options, engines, lmcache, listen, out)


def _finish(options: InitOptions, engines: dict[str, str], lmcache: str, listen: str, out: TextIO) -> int:
    """Probe the engines, write the file, and print the next steps."""
    found: list[tuple[list[SeenEngine], SeenLmCache | None]] = []

    async def visit() -> int:
        found.append(await look_at_all(engines, lmcache))
        return 0

    run_loop(visit)
    seen, controller = found[0]
    for one in (*seen, *([controller] if controller is not None else ())):
        print(f"  {one.describe()}{'; written anyway' if one.trouble else ''}", file=out)
    text = _HEAD + write_config(seen, controller, listen=listen)
    config, problems = check_config(text, env={})
    errors = [problem for problem in problems if problem.severity == "error"]
    if errors:
        raise ConfigError(errors)
    _write(options.output, text)
    usual = options.output == Path("config.yaml")
    file, given = ("", "") if usual else (f" {shlex.quote(str(options.output))}",) * 2
    print(f"\nwrote {options.output}. Next:\n", file=out)
    print(
        f"  kvproxy doctor{' -c' if given else ''}{given}    # looks closer, with two or three tiny requests", file=out
    )
    print(f"  kvproxy check{file}     # after every change of the file", file=out)
    print(f"  kvproxy serve{' -c' if given else ''}{given}", file=out)
    if flags := list(list_flags(seen)):
        print("\nWorth adding to the engines' command lines:\n", file=out)
        for engines_named, flag in flags:
            print(f"  # {engines_named}\n  {flag}", file=out)
    if config is not None:
        print("", *list_gains(config), sep="\n", file=out)
    return 0


def list_flags(seen: Sequence[SeenEngine]) -> Iterator[tuple[str, str]]:
    """For vLLM and for SGLang engines: which ones, and the flags that kvproxy gains by, on one line to paste."""
    for sglang, kind in ((False, EngineKind.VLLM), (True, EngineKind.SGLANG)):
        members = [one for one in seen if one.models and one.sglang is sglang]
        if not members:
            continue
        settings = [Setting.CACHE_REPORT, Setting.SCHEDULING]
        if not all(one.events for one in members):
            settings.append(Setting.KV_EVENTS)
        flags = [spell_flag(one, kind) for one in settings]
        yield ", ".join(one.id for one in members), " ".join(flags + (["--enable-metrics"] if sglang else []))


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
