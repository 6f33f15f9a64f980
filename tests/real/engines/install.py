"""Installs what is missing of the real engines: `python -m tests.real.engines.install`. Running it again is free."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.real.engines.place import (
    HERE,
    LMCACHE,
    MID,
    NIXL,
    NIXL_VERSIONS,
    SGLANG,
    TINY,
    VLLM,
    Environment,
    Model,
    root,
)

#: The Python the lists of versions were made for; LMCache's hashes must agree with the engines'.
PYTHON = os.environ.get("KVPROXY_REAL_PYTHON", "python3.11")

#: Where CPU builds of torch are found when the configured index has none.
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"

_TRIALS: dict[str, tuple[str | Path, ...]] = {
    "vllm": ("-c", "import vllm"),
    "lmcache": ("-c", "import lmcache.v1.api_server"),
    "sglang": (HERE / "inside" / "sglang_on_cpu.py", "--help"),
}
_SIZES = {
    "vllm": "vLLM 0.32.0 for CPU, 2.5 GB, about 2 minutes",
    "lmcache": "LMCache 0.5.6, 1.5 GB, about 1 minute",
    "sglang": "SGLang 0.5.23, 0.4 GB, about 1 minute",
}


class StepFailed(Exception):
    """A command of the installation failed; its output is in the log."""


class Steps:
    """Runs commands, says what is going on, and keeps their output in a log."""

    def __init__(self, log: Path) -> None:
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_bytes(b"")

    def say(self, text: str) -> None:
        """One line of progress."""
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    def run(self, what: str, *command: str | Path, environment: dict[str, str] | None = None) -> None:
        """One step; raises StepFailed with the end of its output."""
        self.say(f"  {what} ...")
        started = time.monotonic()
        with self._log.open("ab") as log:
            code = subprocess.run(
                command, stdout=log, stderr=log, env={**os.environ, **(environment or {})}, check=False
            ).returncode
        if code:
            tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-12:])
            raise StepFailed(f"{what} failed; the end of {self._log}:\n{tail}")
        self.say(f"  {what}: {time.monotonic() - started:.0f} s")


def install_environment(environment: Environment, steps: Steps) -> None:
    """Install the exact versions and nothing else; dependencies are not resolved, since theirs would draw in CUDA
    builds."""
    if environment.installed:
        steps.say(f"{environment.name}: installed in {environment.folder}")
        return
    steps.say(f"{environment.name}: installing into {environment.folder} ({_SIZES[environment.name]})")
    if shutil.which(PYTHON) is None:
        raise StepFailed(f"{PYTHON} is not here; install it, or name another one in KVPROXY_REAL_PYTHON")
    if not environment.python.exists():
        steps.run("virtual environment", PYTHON, "-m", "venv", environment.folder)
    pip = (environment.python, "-m", "pip", "--disable-pip-version-check", "install", "--no-deps", "--progress-bar=off")
    if environment.base is None:
        _install_torch(pip, environment, steps)
    else:
        _lay_on(environment.base, environment)
    steps.run("packages", *pip, "-r", environment.versions)
    quiet = {"LMCACHE_LOG_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "LMCACHE_TRACK_USAGE": "false"}
    steps.run("a first import", environment.python, *_TRIALS[environment.name], environment=quiet)
    environment.mark_installed()


def _lay_on(base: Environment, environment: Environment) -> None:
    """Make the packages of `base` visible where the environment lacks them."""
    for packages in (environment.folder / "lib").glob("python*/site-packages"):
        (packages / "base.pth").write_text(f"{base.folder / packages.relative_to(environment.folder)}\n")


def _install_torch(pip: Sequence[str | Path], environment: Environment, steps: Steps) -> None:
    """Install the CPU build, which the list names as such, so that a gigabyte of CUDA never comes by accident."""
    wanted = next(line for line in environment.versions.read_text().splitlines() if line.startswith("torch=="))
    try:
        steps.run("torch for CPU", *pip, wanted)
    except StepFailed:
        steps.run(f"torch for CPU, from {TORCH_INDEX}", *pip, wanted, "--extra-index-url", TORCH_INDEX)


def install_nixl(steps: Steps) -> None:
    """Install it into a folder of its own, without what CUDA needs."""
    if (NIXL / "nixl").exists():
        steps.say(f"nixl: installed in {NIXL}")
        return
    pip = (VLLM.python, "-m", "pip", "--disable-pip-version-check", "install", "--no-deps", "--progress-bar=off")
    steps.run("NIXL, 70 MB", *pip, "--target", NIXL, *NIXL_VERSIONS)


def make_model(model: Model, steps: Steps) -> None:
    """Random weights by a fixed seed."""
    if model.made:
        steps.say(f"model {model.name}: made in {model.folder}")
        return
    steps.say(f"model {model.name}: making it in {model.folder}")
    steps.run("weights, tokenizer, template", VLLM.python, HERE / "inside" / "tiny_model.py", *model.arguments)
    model.mark_made()


def main() -> int:
    steps = Steps(root() / "install.log")
    try:
        for environment in (VLLM, LMCACHE, SGLANG):
            install_environment(environment, steps)
        install_nixl(steps)
        for model in (TINY, MID):
            make_model(model, steps)
    except StepFailed as error:
        steps.say(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
