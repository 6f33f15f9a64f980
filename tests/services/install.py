"""Installs the servers the tests in this folder run against, as far as this machine lets: `make test-services`.

A package a line: what is missing afterwards, the tests say and skip.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

#: Program -> the Debian package that brings it.
APT = {"redis-server": "redis-server", "nats-server": "nats-server", "etcd": "etcd-server"}
#: Module -> the distribution that brings it.
PIP: dict[str, str] = {}


def main() -> None:
    """Installs what is missing and can be had."""
    wanted = [package for program, package in APT.items() if shutil.which(program) is None]
    if wanted and shutil.which("apt-get") is not None and os.geteuid() == 0:
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        subprocess.run(["apt-get", "install", "-y", "-q", *wanted], check=False, env=environment)
    elif wanted:
        print(f"not installed, and not to be installed from here: {', '.join(wanted)}", file=sys.stderr)  # noqa: T201
    missing = [distribution for program, distribution in PIP.items() if shutil.which(program) is None]
    if missing:
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *missing], check=False)


if __name__ == "__main__":
    main()
