"""The command `kvproxy warm`, as its help shows it."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvproxy.operate.commands.options import Command, add_config_option, parse_count


def add_options(warm: argparse.ArgumentParser) -> None:
    """Add the file, where it goes and for how long it is tried."""
    warm.add_argument("prompts", type=Path, metavar="PROMPTS", help="JSON lines")
    add_config_option(warm)
    warm.add_argument("--replicas", type=parse_count, default=1, metavar="N", help="endpoints for each (default 1)")
    warm.add_argument(
        "--wait", type=float, default=60.0, metavar="S", help="for an endpoint that is busy (default %(default)s)"
    )
    warm.add_argument("--url", help="a running proxy's admin listener instead of -c: its routing learns of it, too")
    warm.add_argument("--token-file", metavar="FILE", help="file with the admin token (else $KVPROXY_ADMIN_TOKEN)")


COMMANDS = (
    Command(
        name="warm",
        group="Operate",
        help="send prompt templates to the endpoints that should hold them, while these are idle",
        description="Each line of PROMPTS is a chat or completion request, as clients send it. It is computed at the "
        "endpoints that hold most of it or are least busy, and sent again to see that it is reused. Exit status: 0 all "
        "of it is, 1 not.",
        examples=(
            "kvproxy warm prompts.jsonl -c config.yaml",
            "kvproxy warm prompts.jsonl --url http://127.0.0.1:8889",
        ),
        add_options=add_options,
        run="kvproxy.features.warming.command:main",
    ),
)
