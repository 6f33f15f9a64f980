"""The command `kvproxy greet`, as its help shows it."""

from __future__ import annotations

import argparse

from kvproxy.operate.commands.options import Command


def add_options(greet: argparse.ArgumentParser) -> None:
    """Add the name."""
    greet.add_argument("name", metavar="NAME", help="person to greet")


COMMANDS = (
    Command(
        name="greet",
        group="Samples",
        help="print a greeting",
        examples=("kvproxy greet Ada",),
        add_options=add_options,
        run="greeting.command:main",
    ),
)
