"""Installs hosts that need older packages than the others in an environment of their own: `make test-hosts`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PACKAGES = (
    "instructor==1.17.0",
    "llama-index-llms-openai-like==0.8.1",
    "lm-eval[api]==0.4.13",
    "litellm[proxy]==1.108.7",
)
#: Lies beside this environment, whose packages it sees where it has none of its own.
FOLDER = Path(sys.prefix).with_name(f"{Path(sys.prefix).name}-apart")
PYTHON = FOLDER / "bin" / "python"


def main() -> None:
    """Install what is missing."""
    stamp = FOLDER / ".kvproxy-installed"
    if stamp.exists() and stamp.read_text() == str(PACKAGES):
        return
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", FOLDER], check=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    below = Path(sys.prefix) / "lib" / version / "site-packages"
    base = FOLDER / "lib" / version / "site-packages" / "base.pth"
    base.write_text(f"import site; site.addsitedir({str(below)!r})\n")
    subprocess.run([PYTHON, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
    stamp.write_text(str(PACKAGES))


if __name__ == "__main__":
    main()
