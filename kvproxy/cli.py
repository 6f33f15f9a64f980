"""The command line: parsing arguments; each command is a `module:function` that takes them."""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from kvproxy import __version__
from kvproxy.base.errors import ConfigError, describe_os_error
from kvproxy.base.settings.feature_settings import list_packages
from kvproxy.operate.commands.help_text import EXAMPLES, USUAL, GroupedHelp, HelpAll, add_examples, hide_options
from kvproxy.operate.commands.options import (
    Command,
    Option,
    add_admin_options,
    add_config_option,
    add_engine_arguments,
    add_lenient_option,
    add_options,
    parse_count,
)

log = logging.getLogger("kvproxy")

_BROKEN_PIPE = 141  # exit status of a program ended by SIGPIPE, as in shells

_Commands = argparse._SubParsersAction


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit status (2 for a wrong command line)."""
    words = sys.argv[1:] if argv is None else argv
    if "_ARGCOMPLETE" in os.environ:  # set by the shell's completion
        import_module("argcomplete").autocomplete(_parser(), exclude=["worker"])
    args, unknown = _parser(words[0] if words else "").parse_known_args(words)
    if unknown:
        args.parser.refuse(unknown)
    try:
        status = _load(args.run)(args)
        sys.stdout.flush()
    except ConfigError as error:
        for problem in error.problems:
            place = f"{problem.place}: " if problem.place else "kvproxy: "
            text = problem.located().removeprefix(place)
            print(f"{place}{problem.severity}: {text}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # otherwise the interpreter reports an error at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    except OSError as error:
        print(f"kvproxy: error: {describe_os_error(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return status


def _load(target: str) -> Callable[[argparse.Namespace], int]:
    """Return the function that `module:name` names; only the command that is called gets imported, since --help must be
    quick."""
    module, _, name = target.partition(":")
    function: Callable[[argparse.Namespace], int] = getattr(import_module(module), name)
    return function


class _Parser(argparse.ArgumentParser):
    """Names the nearest choice where one is misspelt; of many options its help shows the usual ones."""

    def format_help(self) -> str:
        """Return what `--help` prints."""
        with hide_options(self.prog.rpartition(" ")[2], self):
            return super().format_help()

    def error(self, message: str) -> NoReturn:
        wrong = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        from kvproxy.operate.config.decode import closest_word  # slow to import, and --help must be quick

        close = wrong and closest_word(wrong[1], re.findall(r"[\w-]+", wrong[2]))
        super().error(f"{message}: did you mean {close!r}?" if close else message)

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """Exit with this command's usage, and the nearest option to the first of these words."""
        from kvproxy.operate.config.decode import closest_word

        options = [option for action in self._actions for option in action.option_strings]
        close = closest_word(unknown[0].partition("=")[0], options)
        self.error(f"unknown: {' '.join(unknown)}" + (f": did you mean {close}?" if close else ""))


def _parser(named: str | None = None) -> argparse.ArgumentParser:
    """Return the parser. With a command, those of the lab get their options, slow to import, only if it needs them."""
    about = "KV-cache-aware reverse proxy for LLM engines."
    parser: argparse.ArgumentParser = _Parser(prog="kvproxy", description=about, formatter_class=GroupedHelp)
    parser.add_argument("--version", action="version", version=f"kvproxy {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", title="commands")
    _add_init(commands)
    _add_serve(commands)
    _add_check(commands)
    _add_doctor(commands)
    _add_status(commands)
    _add_explain(commands)
    _add_drain(commands)
    _add_reload(commands)
    if find_spec("kvproxy.features.workers") is not None:
        _add_worker(commands)
    _add_replay(commands, options=named in (None, "replay"))
    _add_plan(commands, options=named in (None, "plan"))
    _add_demo(commands)
    _add_simulate(commands)
    _add_completion(commands)
    for one in list_feature_commands():
        _add_feature_command(commands, one)
    for name, command in commands.choices.items():
        command.formatter_class = GroupedHelp
        command.set_defaults(parser=command)
        if name in EXAMPLES:
            add_examples(name, command, EXAMPLES[name])
        if name in USUAL:
            command.add_argument("--help-all", action=HelpAll, nargs=0, help="show every option and exit")
    parser.epilog = "`kvproxy COMMAND --help` shows a command's options with examples."
    return parser


def list_feature_commands() -> Iterator[Command]:
    """Yield the commands of features: those of a module `options` beside the feature, which is not loaded."""
    for package in list_packages().values():
        try:
            if find_spec(module := f"{package}.options") is not None:
                yield from import_module(module).COMMANDS
        except Exception as error:  # noqa: BLE001 - as of a feature that cannot be loaded
            log.warning("commands of %s are left out: %s: %s", package, type(error).__name__, error)


def _add_feature_command(commands: _Commands[argparse.ArgumentParser], added: Command) -> None:
    if added.name in commands.choices:
        log.warning("a feature's command %s is left out: another command has its name", added.name)
        return
    command = commands.add_parser(added.name, help=added.help, description=added.description)
    added.add_options(command)
    command.set_defaults(run=added.run, group=added.group)
    add_examples(added.name, command, added.examples)


def _add_init(commands: _Commands[argparse.ArgumentParser]) -> None:
    init = commands.add_parser(
        "init",
        help="find out about the engines and write config.yaml",
        description="Prompts for the engines (or takes --engine), queries each, and writes a configuration.",
    )
    init.add_argument("--engine", action="append", default=[], metavar="[ID=]URL", help="an engine; repeat for more")
    init.add_argument("--lmcache", metavar="URL", help="LMCache's controller or coordinator, where there is one")
    init.add_argument("--listen", metavar="HOST:PORT", help="address for clients (default 127.0.0.1:8888)")
    init.add_argument("-o", "--output", metavar="FILE", default="config.yaml", help="file to write (%(default)s)")
    init.add_argument("-y", "--yes", action="store_true", help="no prompts: use the given options and the defaults")
    init.add_argument("--force", action="store_true", help="replace the file if there is one")
    init.set_defaults(run="kvproxy.operate.commands.init:main")


def _add_serve(commands: _Commands[argparse.ArgumentParser]) -> None:
    serve = commands.add_parser("serve", help="run the proxy", description="Run the proxy until SIGTERM.")
    add_config_option(serve)
    serve.add_argument("--host", help="address of the public listener (without a file: 127.0.0.1)")
    serve.add_argument("--port", type=int, help="its port (without a file: 8888); 0 takes a free one")
    add_engine_arguments(serve)
    serve.add_argument("--policy", help="balancing policy (without a file)")
    serve.set_defaults(run="kvproxy.operate.commands.serve:main", changes=())
    if find_spec("kvproxy.features.workers") is not None:
        serve.add_argument("--workers", type=_workers, metavar="N", help="processes behind the one socket, or `auto`")
        serve.set_defaults(changes=("workers",))
    serve.add_argument("--no-admin", action="store_true", help="no admin listener")


def _workers(text: str) -> int | str:
    if text == "auto":
        return text
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:3]) <= 64:
        raise argparse.ArgumentTypeError(f"must be `auto` or a whole number from 1 to 64, not {text!r}")
    return int(text)


def _add_check(commands: _Commands[argparse.ArgumentParser]) -> None:
    check = commands.add_parser(
        "check",
        help="find every problem of a configuration at once",
        description="Prints every problem of a configuration as FILE:LINE:COLUMN: SEVERITY: PATH: WHAT, in the order "
        "of the file. Contacts no engine (`kvproxy doctor` does). Exit status: 0 good (warnings included), 1 errors.",
    )
    check.add_argument("file", nargs="?", metavar="FILE", help="else $KVPROXY_CONFIG or ./config.yaml")
    check.add_argument("-c", "--config", metavar="FILE", help="the same, as of other commands")
    check.add_argument("--schema", action="store_true", help="print the JSON Schema of the native dialect instead")
    add_lenient_option(check)
    check.set_defaults(run="kvproxy.operate.commands.configuration:main_check")


def _add_doctor(commands: _Commands[argparse.ArgumentParser]) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="check the engines and LMCache for faults in the setup, with fixes",
        description="Visits the configured engines and LMCache; sends each engine two or three requests of one token. "
        "Exit status: 0 fine, 1 problems, 2 warnings only (with --strict).",
    )
    add_config_option(doctor)
    add_engine_arguments(doctor)
    doctor.add_argument("--timeout", default="5s", metavar="DURATION", help="for one exchange (default 5s)")
    doctor.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    doctor.add_argument("--strict", action="store_true", help="exit with 2 when there are only warnings")
    doctor.add_argument("-v", "--verbose", action="store_true", help="list the checks that passed, too")
    if find_spec("kvproxy.features.hygiene") is not None:
        _add_traffic(doctor)
    advise = doctor.add_argument_group(
        "advice",
        "instead of the visit: settings that would help the traffic recorded in receipts; nothing is changed",
    )
    advise.add_argument(
        "--advise",
        dest="run",
        action="store_const",
        const="kvproxy.lab.advise.command:main",
        help="engine settings and kvproxy's own, with the expected gain",
    )
    advise.add_argument(
        "--advise-budget",
        default="60s",
        metavar="DURATION",
        help="for simulations; 0s: only advice without them (default %(default)s)",
    )
    advise.add_argument("--receipts", type=Path, metavar="FILE", help="else `receipts.path` of the configuration")
    doctor.set_defaults(run="kvproxy.operate.commands.doctor:main")


def _add_traffic(doctor: argparse.ArgumentParser) -> None:
    traffic = doctor.add_argument_group(
        "traffic",
        "instead of the visit: causes of broken prefixes of returning sessions, from a running proxy, or from "
        "--receipts",
    )
    traffic.add_argument(
        "--traffic",
        dest="run",
        action="store_const",
        const="kvproxy.features.hygiene.command:main",
        help="by cause, client and tenant, with the cost",
    )
    add_admin_options(traffic)


def _add_status(commands: _Commands[argparse.ArgumentParser]) -> None:
    status = commands.add_parser("status", help="endpoints, routing and cache of a running proxy, in the terminal")
    add_admin_options(status)
    status.add_argument("--watch", action="store_true", help="every second, until Ctrl-C")
    status.add_argument("--json", action="store_true", help="the answer of /live, one JSON object per line")
    status.set_defaults(run="kvproxy.operate.commands.status:main")


def _add_explain(commands: _Commands[argparse.ArgumentParser]) -> None:
    explain = commands.add_parser(
        "explain",
        help="explain the routing of a request",
        description="Explains a request's routing by its receipt, else by a running proxy, which keeps the last 1,000.",
    )
    explain.add_argument("request_id", metavar="REQUEST_ID", help="x-request-id of the answer, or its beginning")
    explain.add_argument("--file", type=Path, help="receipts, rotated ones included (else ./receipts.jsonl)")
    add_admin_options(explain)
    explain.add_argument("--json", action="store_true", help="the receipt itself")
    explain.set_defaults(run="kvproxy.operate.commands.explain:main")


def _add_drain(commands: _Commands[argparse.ArgumentParser]) -> None:
    helps = {
        "drain": "stop new requests to an endpoint of a running proxy; it finishes those it has",
        "undrain": "resume traffic to a drained endpoint",
    }
    for name, text in helps.items():
        drain = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        drain.add_argument("endpoint", metavar="ENDPOINT", help="its id")
        drain.add_argument("--cluster", help="its cluster, where several have an endpoint with this id")
        if name == "drain":
            drain.add_argument("--wait", action="store_true", help="until the requests it has are finished")
            if find_spec("kvproxy.features.resume") is not None:
                drain.add_argument("--move", action="store_true", help="have its streams go on elsewhere that can")
        add_admin_options(drain)
        drain.set_defaults(run="kvproxy.operate.commands.operate:main_drain", draining=name == "drain")


def _add_reload(commands: _Commands[argparse.ArgumentParser]) -> None:
    text = "reload the configuration file of a running proxy"
    reload = commands.add_parser("reload", help=text, description=f"{text[0].upper()}{text[1:]}.")
    add_admin_options(reload)
    reload.set_defaults(run="kvproxy.operate.commands.operate:main_reload")


def _add_worker(commands: _Commands[argparse.ArgumentParser]) -> None:
    """Add the hidden command that `serve --workers` starts."""
    worker = commands.add_parser("worker")
    worker.add_argument("line", type=int, metavar="DESCRIPTOR", help="of the line to the supervisor")
    worker.set_defaults(run="kvproxy.features.workers.command:main")


def _add_replay(commands: _Commands[argparse.ArgumentParser], *, options: bool) -> None:
    replay = commands.add_parser("replay", help="routing policies side by side on a trace, in virtual time or live")
    if options:
        import_module("kvproxy.lab.replay.options").add_arguments(replay)
    replay.set_defaults(run="kvproxy.lab.replay.command:main")


def _add_plan(commands: _Commands[argparse.ArgumentParser], *, options: bool) -> None:
    plan = commands.add_parser("plan", help="estimate KV cache size, tier capacity and expected hit rate")
    if options:
        import_module("kvproxy.lab.planner.options").add_arguments(plan)
    plan.set_defaults(run="kvproxy.lab.planner.command:main")


def _add_kind(parser: argparse.ArgumentParser) -> None:
    kinds = ("vllm", "sglang")
    parser.add_argument("--engine", dest="kind", choices=kinds, default="vllm", help="their kind (default vllm)")


def _tokens(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 16 <= int(text[:10]) <= 1_000_000_000:
        raise argparse.ArgumentTypeError(f"must be a whole number from 16 to 1,000,000,000, not {text!r}")
    return int(text)


_DEMO = (
    Option("--tiers", None, False, "engines with host memory: the benefit of tier-aware routing"),
    Option("--disaggregated", None, False, "half of the engines compute long prompts for the others"),
    Option("--engines", None, 3, "simulated engines (default 3)", parse_count),
    Option("--ranks", None, 1, "data-parallel ranks of each, of SGLang's (default 1)", parse_count),
    Option("--sessions", None, int, "conversations (default 15; with --tiers 12)", parse_count),
    Option("--turns", None, 5, "turns of each (default 5)", parse_count),
    Option("--stay", None, False, "leave everything running until Ctrl-C"),
    Option("--kill-an-engine", None, False, "kill an engine under streams: they go on elsewhere"),
)
_SIMULATE = (
    Option("--engine-version", "V", "", "reported version, as in 0.18.0"),
    Option("--engines", "N", 2, "how many (default 2)", parse_count),
    Option("--port", None, 8000, "of the first (default 8000); 0: free ones"),
    Option("--model", None, "sim", "its name (default sim)"),
    Option("--kv-events", None, False, "publish KV events"),
    Option("--lmcache", "PORT", int, "an LMCache controller there; 0: a free one"),
    Option("--kv-tokens", "N", 65_536, "KV memory of each engine (default 65536)", _tokens),
    Option("--prefill-speed", "N", 10_000, "prompt tokens computed per second (default 10000)", _tokens),
)


def _add_demo(commands: _Commands[argparse.ArgumentParser]) -> None:
    demo = commands.add_parser("demo", help="simulated engines, a controller and the proxy, with real traffic")
    _add_kind(demo)
    add_options(demo, _DEMO)
    demo.set_defaults(run="kvproxy.lab.demo.demo:main")


def _add_simulate(commands: _Commands[argparse.ArgumentParser]) -> None:
    simulate = commands.add_parser(
        "simulate",
        help="simulated engines and LMCache alone, to try a configuration without a GPU",
        description="Serves simulated engines, and LMCache and KV events if requested, until Ctrl-C. Answers are made "
        "up; timing, caching and errors are those of real engines. With -c they stand in for the engines of a file.",
    )
    add_config_option(simulate)
    moved = "with -c: write a copy of it with the stand-ins' addresses"
    simulate.add_argument("-o", "--output", type=Path, metavar="FILE", help=moved)
    _add_kind(simulate)
    add_options(simulate, _SIMULATE)
    simulate.add_argument(
        "--fault",
        action="append",
        default=[],
        metavar="[ENGINE:]NAME=VALUE",
        help="as in sim-1:stall_first_byte_s=2 or fail_next=10; repeat for more",
    )
    simulate.set_defaults(run="kvproxy.lab.simulate:main")


def _add_completion(commands: _Commands[argparse.ArgumentParser]) -> None:
    completion = commands.add_parser("completion", help="a script that completes commands and options in your shell")
    completion.add_argument("shell", choices=("bash", "zsh", "fish"))
    completion.set_defaults(run="kvproxy.operate.commands.help_text:main_completion")
