"""`kvproxy init`: asks where the engines are, looks at them, writes a configuration that suits what it saw."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from kvproxy.commands.init_file import config_text
from kvproxy.commands.init_probe import Seen, SeenLmCache, look
from kvproxy.commands.serve import run_loop
from kvproxy.config.addresses import base_of_copied, url_fault
from kvproxy.config.load import check_config
from kvproxy.config.shorthand import parse_endpoint
from kvproxy.errors import ConfigError, Problem

_DEFAULT_ENGINE = "http://127.0.0.1:8000"
_DEFAULT_LISTEN = "127.0.0.1:8888"


@dataclass(frozen=True, slots=True)
class InitOptions:
    """What the command line says; what it leaves out is asked, or defaulted with `yes`."""

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
    engines = dict(_engines(given))
    asked = options.lmcache is None and answers.asking
    lmcache = answers.text("LMCache controller or coordinator, as a URL", "") if asked else options.lmcache or ""
    if lmcache and (fault := url_fault(lmcache)):
        raise ConfigError([Problem("--lmcache", fault)])
    listen = options.listen or answers.text("Where clients connect", _DEFAULT_LISTEN)
    return _finish(options, engines, lmcache, listen, out)


def _finish(options: InitOptions, engines: dict[str, str], lmcache: str, listen: str, out: TextIO) -> int:
    """Look, write, and tell what comes next."""
    found: list[tuple[list[Seen], SeenLmCache | None]] = []

    async def visit() -> int:
        found.append(await look(engines, lmcache))
        return 0

    run_loop(visit)
    seen, controller = found[0]
    for one in (*seen, *([controller] if controller is not None else ())):
        print(f"  {one.words()}", file=out)
    text = config_text(seen, controller, listen=listen)
    _, problems = check_config(text, env={})
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
    return 0


def _engines(given: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Ids and base URLs; what people copy from a client (`.../v1`) is cut to the engine's own address."""
    faults: list[Problem] = []
    ids: set[str] = set()
    for text in given:
        endpoint = parse_endpoint(text if "://" in text else _with_scheme(text))
        name = endpoint["id"] if "=" in text.partition("://")[0] else _name(len(ids))
        url = base_of_copied(endpoint["url"])
        if fault := url_fault(url):
            faults.append(Problem(text, fault, "http://host:port"))
        elif name in ids:
            faults.append(Problem(text, f"another engine has the id {name!r}"))
        else:
            yield name, url
        ids.add(name)
    if faults:
        raise ConfigError(faults)


def _with_scheme(text: str) -> str:
    name, equals, address = text.rpartition("=")
    return f"{name}{equals}http://{address}"


def _name(number: int) -> str:
    return f"engine-{number + 1}"


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
