"""`kvproxy greet`: imported when it is called."""

from __future__ import annotations

import argparse


def main(args: argparse.Namespace) -> int:
    """Print the greeting; the exit status."""
    print(f"hello, {args.name}")
    return 0
