"""Programs in Node with the SDKs of OpenAI, Anthropic, Vercel and LangChain. An outcome is what a call gave."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.compat.environments import INSIDE, PLACE
from tests.real.engines.place import TINY

PROGRAMS = ("openai", "anthropic", "ai", "langchain")
_LIMIT_S = 300


def install() -> Path:
    """Return the folder of the programs with the packages that they need."""
    folder = PLACE / "node"
    stamp, wanted = folder / ".kvproxy-installed", (INSIDE / "node" / "package.json").read_text()
    shutil.copytree(INSIDE / "node", folder, dirs_exist_ok=True)
    if not stamp.exists() or stamp.read_text() != wanted:
        subprocess.run(["npm", "install", "--silent", "--no-fund", "--no-audit"], cwd=folder, check=True)
        stamp.write_text(wanted)
    return folder


def run(url: str) -> dict[str, str]:
    """Return the outcomes of the calls of all programs; none where there is no Node."""
    if shutil.which("npm") is None:
        sys.stdout.write("node: not run, npm is not here\n")
        return {}
    folder = install()
    environment = {**os.environ, "KVPROXY_COMPAT_URL": url, "KVPROXY_COMPAT_MODEL": TINY.name}
    found: dict[str, str] = {}
    for name in PROGRAMS:
        program = subprocess.run(
            ["node", f"{name}.mjs"], cwd=folder, env=environment, stdout=subprocess.PIPE, timeout=_LIMIT_S, check=True
        )
        calls = json.loads(program.stdout)
        found |= {f"{name}::{call}": json.dumps(outcome) for call, outcome in calls.items()}
    return found
