"""`kvproxy completion`: by argcomplete, which asks the command line itself at each TAB."""

from __future__ import annotations

import argparse
import sys

from argcomplete.shell_integration import shellcode


def main(args: argparse.Namespace) -> int:
    """Print the script for a shell."""
    sys.stdout.write(shellcode(["kvproxy"], shell=args.shell))
    return 0
