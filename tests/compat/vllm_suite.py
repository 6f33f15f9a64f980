"""vLLM's own tests of its API, taken from the source distribution of the version in tests/real."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

from tests.real.engines.place import TINY, VLLM, root

HERE = Path(__file__).parent
PLACE = root() / "compat"
FOLDER = "tests/entrypoints"
#: Tests that need nothing but a server.
FILES = (
    "openai/chat_completion/test_chat_completion.py",
    "openai/chat_completion/test_batched_chat_completions.py",
    "openai/chat_completion/test_non_object_body_validation.py",
    "openai/completion/test_completion.py",
    "openai/completion/test_prompt_validation.py",
    "openai/models/test_models.py",
    "openai/responses/test_basic.py",
    "openai/responses/test_errors.py",
    "openai/test_return_token_ids.py",
    "openai/test_stop_token_ids.py",
    "serve/tokenize/test_tokenization.py",
    "serve/instrumentator/test_basic.py",
)
_MODEL = re.compile(r'^\s*(?:MODEL_NAME|model_name)\w*\s*(?::[^=]*)?=\s*"([^"]+)"', re.MULTILINE)
_LIMIT_S = 1800


def version() -> str:
    """Return vLLM's version as tests/real installs it."""
    found = re.search(r"^vllm\S*==(\S+)$", VLLM.versions.read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def fetch() -> Path:
    """Return the folder of the unpacked tests, downloaded on first use. The package itself is not unpacked: it would
    hide the installed one."""
    folder = PLACE / f"vllm-{version()}"
    if not (folder / FOLDER).exists():
        archive = PLACE / f"vllm-{version()}.tar.gz"
        if not archive.exists():
            _download()
        with tarfile.open(archive) as packed:
            wanted = [one for one in packed if one.name.startswith(f"{folder.name}/{FOLDER}/")]
            packed.extractall(PLACE, members=wanted, filter="data")
        for path in (folder / "tests", folder / FOLDER):
            (path / "__init__.py").touch()  # without vLLM's conftest, which wants every package there is
    return folder


def _download() -> None:
    """Pip computes metadata of what it downloads, by vLLM's build script: hence its tools and the two variables."""
    tools = PLACE / "build-tools"
    pip = (str(VLLM.python), "-m", "pip", "--quiet", "--disable-pip-version-check")
    subprocess.run([*pip, "install", "--target", str(tools), "setuptools_rust", "setuptools_scm", "cmake"], check=True)
    own = {"PYTHONPATH": str(tools), "VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": version()}
    subprocess.run(
        [*pip, "download", "--no-deps", "--no-build-isolation", "--no-binary", "vllm", f"vllm=={version()}"],
        cwd=PLACE,
        env={**os.environ, **own},
        check=True,
    )


def install() -> Path:
    """Return the Python that runs the suites, in an environment laid on vLLM's."""
    folder = PLACE / "venv"
    python = folder / "bin" / "python"
    stamp = folder / ".kvproxy-installed"
    wanted = (HERE / "packages.txt").read_text()
    if not stamp.exists() or stamp.read_text() != wanted:
        subprocess.run([VLLM.python, "-m", "venv", folder], check=True)
        for packages in (folder / "lib").glob("python*/site-packages"):
            (packages / "base.pth").write_text(f"{VLLM.folder / packages.relative_to(folder)}\n")
        pip = (python, "-m", "pip", "--quiet", "--disable-pip-version-check")
        subprocess.run([*pip, "install", "-r", HERE / "packages.txt"], check=True)
        stamp.write_text(wanted)
    return python


def model_names(folder: Path, files: Sequence[str]) -> list[str]:
    """Return every model that these tests name: the engine serves one by all the names."""
    texts = ((folder / FOLDER / name).read_text() for name in files)
    return sorted({TINY.name, *(name for text in texts for name in _MODEL.findall(text))})


def run(url: str, files: Sequence[str]) -> str:
    """Return the JUnit report of these tests against the server at `url`."""
    python, folder, report = install(), fetch(), PLACE / "report.xml"
    report.unlink(missing_ok=True)
    command = [python, "-m", "pytest", "-q", "-p", "remote_server", "--timeout=120", f"--junitxml={report}"]
    command += ["-o", "asyncio_mode=auto", "-p", "no:cacheprovider", *(f"{FOLDER}/{name}" for name in files)]
    environment = {
        **os.environ,
        "PYTHONPATH": str(HERE / "inside"),
        "KVPROXY_COMPAT_URL": url,
        "KVPROXY_COMPAT_TOKENIZER": str(TINY.folder),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    with (PLACE / "pytest.log").open("ab") as log:
        subprocess.run(command, cwd=folder, env=environment, stdout=log, stderr=log, timeout=_LIMIT_S, check=False)
    if not report.exists():
        sys.exit(f"the suite did not run; see {PLACE / 'pytest.log'}")
    return report.read_text()
