"""The command line: argument parsing and output only."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from kvproxy import __version__
from kvproxy.errors import ConfigError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit status (2 for a wrong command line)."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        status: int = args.run(args)
    except ConfigError as error:
        for problem in error.problems:
            print(f"kvproxy: {problem.severity}: {problem}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"kvproxy: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvproxy", description="KV-cache-aware reverse proxy for LLM engines.")
    parser.add_argument("--version", action="version", version=f"kvproxy {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_serve(commands)
    _add_check(commands)
    _add_doctor(commands)
    _add_status(commands)
    _add_demo(commands)
    _add_replay(commands)
    _add_explain(commands)
    return parser


def _add_serve(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    serve = commands.add_parser("serve", help="run the proxy", description="Run the proxy until SIGTERM.")
    serve.add_argument("-c", "--config", metavar="FILE", help="configuration (native or Pixiu dialect)")
    serve.add_argument("--host", help="address of the public listener (without a file: 127.0.0.1)")
    serve.add_argument("--port", type=int, help="its port (without a file: 8888); 0 takes a free one")
    serve.add_argument("--endpoint", action="append", default=[], metavar="ID=URL", help="an engine; repeat for more")
    serve.add_argument("--policy", help="balancing policy (with --endpoint)")
    serve.add_argument("--no-admin", action="store_true", help="no admin listener (with --endpoint)")
    serve.add_argument(
        "--lenient", action="store_true", help="warn about unknown keys of a Pixiu file instead of failing"
    )
    serve.set_defaults(run=_serve)


def _serve(args: argparse.Namespace) -> int:
    from kvproxy.commands import serve
    from kvproxy.commands.configuration import Source

    source = Source(
        path=args.config,
        endpoints=args.endpoint,
        host=args.host,
        port=args.port,
        policy=args.policy,
        admin=not args.no_admin,
        lenient=args.lenient,
    )
    return serve.run(source)


def _add_check(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    check = commands.add_parser("check", help="find every problem of a configuration at once")
    check.add_argument("file", nargs="?", metavar="FILE")
    check.add_argument("--schema", action="store_true", help="print the JSON Schema of the native dialect instead")
    check.add_argument(
        "--lenient", action="store_true", help="warn about unknown keys of a Pixiu file instead of failing"
    )
    check.set_defaults(run=_check)


def _check(args: argparse.Namespace) -> int:
    from kvproxy.commands import check

    if args.schema:
        return check.print_schema(sys.stdout)
    if not args.file:
        print("kvproxy check: a FILE (or --schema) is required", file=sys.stderr)
        return 2
    return check.run(args.file, lenient=args.lenient, out=sys.stdout)


def _add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="visit the engines and LMCache: what is wrong with the setup, and how to mend it",
        description="Visits the configured engines and LMCache; sends each engine two or three requests of one token. "
        "Exit status: 0 fine, 1 problems, 2 warnings only (with --strict).",
    )
    doctor.add_argument("-c", "--config", metavar="FILE", help="configuration (native or Pixiu dialect)")
    doctor.add_argument("--endpoint", action="append", default=[], metavar="ID=URL", help="an engine; repeat for more")
    doctor.add_argument("--timeout", default="5s", metavar="DURATION", help="for one exchange (default 5s)")
    doctor.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    doctor.add_argument("--strict", action="store_true", help="exit with 2 when there are only warnings")
    doctor.add_argument(
        "--lenient", action="store_true", help="warn about unknown keys of a Pixiu file instead of failing"
    )
    doctor.set_defaults(run=_doctor)


def _doctor(args: argparse.Namespace) -> int:
    from kvproxy.commands import doctor

    options = doctor.DoctorOptions(args.config, args.endpoint, args.timeout, args.json, args.strict, args.lenient)
    return doctor.run(options, out=sys.stdout, err=sys.stderr)


def _add_status(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    status = commands.add_parser("status", help="endpoints, routing and cache of a running proxy, in the terminal")
    status.add_argument("--url", default="http://127.0.0.1:8889", help="its admin listener (default %(default)s)")
    status.add_argument("--token-file", metavar="FILE", help="file with the admin token, where there is one")
    status.add_argument("--watch", action="store_true", help="every second, until Ctrl-C")
    status.set_defaults(run=_status)


def _status(args: argparse.Namespace) -> int:
    from kvproxy.commands import status

    options = status.StatusOptions(args.url, args.token_file, args.watch)
    return status.run(options, out=sys.stdout, err=sys.stderr)


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    demo = commands.add_parser("demo", help="simulated engines, a controller and the proxy, with real traffic")
    demo.add_argument("--engines", type=int, default=3, help="simulated engines (default 3)")
    demo.add_argument("--sessions", type=int, default=15, help="conversations (default 15)")
    demo.add_argument("--turns", type=int, default=5, help="turns of each (default 5)")
    demo.add_argument("--stay", action="store_true", help="leave everything running until Ctrl-C")
    demo.set_defaults(run=_demo)


def _demo(args: argparse.Namespace) -> int:
    from kvproxy.commands import demo

    return demo.run(engines=args.engines, sessions=args.sessions, turns=args.turns, stay=args.stay, out=sys.stdout)


def _add_replay(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from kvproxy.replay.options import add_arguments

    replay = commands.add_parser("replay", help="routing policies side by side on a trace, in virtual time or live")
    add_arguments(replay)
    replay.set_defaults(run=_replay)


def _replay(args: argparse.Namespace) -> int:
    from kvproxy.replay import command

    return command.run(args, out=sys.stdout, err=sys.stderr)


def _add_explain(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    explain = commands.add_parser("explain", help="why a request went where it went, from its receipt")
    explain.add_argument("request_id", metavar="REQUEST_ID", help="as in the x-request-id header of the answer")
    explain.add_argument(
        "--file", type=Path, default=Path("receipts.jsonl"), help="receipts, rotated ones included (%(default)s)"
    )
    explain.add_argument("--json", action="store_true", help="the receipt itself")
    explain.set_defaults(run=_explain)


def _explain(args: argparse.Namespace) -> int:
    from kvproxy.commands import explain

    return explain.run(args.request_id, file=args.file, as_json=args.json, out=sys.stdout, err=sys.stderr)
