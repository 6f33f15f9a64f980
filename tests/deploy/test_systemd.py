"""The systemd unit: systemd itself finds nothing wrong, and its commands exist."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from kvproxy.cli import _parser

UNIT = Path(__file__).parents[2] / "deploy" / "systemd" / "kvproxy.service"


def settings() -> dict[str, list[str]]:
    """Values by name, in order; repeated names have several."""
    found: dict[str, list[str]] = {}
    for line in UNIT.read_text().splitlines():
        name, sign, value = line.partition("=")
        if sign and not line.startswith("#"):
            found.setdefault(name, []).append(value)
    return found


def test_its_commands_are_ours() -> None:
    """Checked before it is started, and both command lines parse."""
    for name in ("ExecStartPre", "ExecStart"):
        (command,) = settings()[name]
        program, *arguments = command.split()
        assert Path(program).name == "kvproxy"
        assert _parser().parse_args(arguments).run


def test_streams_under_way_may_finish() -> None:
    """systemd waits longer than the drain takes by default, and kills no child before."""
    (stop,) = settings()["TimeoutStopSec"]
    assert int(stop) > 30
    assert settings()["KillMode"] == ["mixed"]


def test_the_binary_may_unpack_and_run_what_it_unpacked() -> None:
    """Into a directory that the unit makes, and from which code may be mapped whatever the mount says."""
    (runtime,) = settings()["RuntimeDirectory"]
    assert f"TMPDIR=/run/{runtime}" in settings()["Environment"]
    assert settings()["ExecPaths"] == [f"/run/{runtime}"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_accepts_it_and_calls_it_well_confined(tmp_path: Path) -> None:
    """`verify` is silent; the exposure is in the best band."""
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/usr/local/bin/kvproxy", "/bin/true"))
    verified = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False)
    assert (verified.returncode, verified.stderr) == (0, "")
    limit = ["--offline=true", "--threshold=20"]  # tenths: 2.0 of 10
    assert (
        subprocess.run(["systemd-analyze", "security", *limit, unit], capture_output=True, check=False).returncode == 0
    )
