"""Where a proxy's configuration comes from: a file, or `--endpoint` options; command line values go over both."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from kvproxy.config.load import check_config, load_endpoints
from kvproxy.config.schema import Config
from kvproxy.errors import ConfigError, Problem
from kvproxy.filters.registry import discover

#: Names the configuration file where the command line names none.
CONFIG_VARIABLE = "KVPROXY_CONFIG"
DEFAULT_FILE = "config.yaml"

_DEFAULT_HOST, _DEFAULT_PORT = "127.0.0.1", 8888


def usual_file(err: TextIO, *, env: Mapping[str, str] = os.environ) -> str | None:
    """The file to take when none is named: `$KVPROXY_CONFIG`, else `./config.yaml`; says which. None: there is none."""
    named = env.get(CONFIG_VARIABLE, "")
    if named:
        print(f"using {named} (from {CONFIG_VARIABLE})", file=err)
        return named
    if not Path(DEFAULT_FILE).is_file():
        return None
    print(f"using ./{DEFAULT_FILE}", file=err)
    return DEFAULT_FILE


@dataclass(frozen=True, slots=True)
class Source:
    """What the command line says; `load` reads it, as often as wanted."""

    path: str | None = None
    endpoints: Sequence[str] = ()
    host: str | None = None
    port: int | None = None
    policy: str | None = None
    admin: bool = True
    lenient: bool = False

    def load(self) -> tuple[Config, list[Problem]]:
        """The configuration, and what is worth saying about it. Raises ConfigError with every error."""
        config, problems = self._read()
        given = {"host": self.host, "port": self.port}
        listen = config.listen.model_copy(update={key: value for key, value in given.items() if value is not None})
        changes: dict[str, object] = {"listen": listen}
        if not self.admin:
            changes["admin"] = config.admin.model_copy(update={"enabled": False})
        return config.model_copy(update=changes), problems

    def _read(self) -> tuple[Config, list[Problem]]:
        if self.path is not None and self.endpoints:
            raise ConfigError([Problem("", "either -c FILE or --endpoint, not both")])
        if self.path is not None:
            extra = {name: kind.settings for name, kind in discover().items()}
            config, problems = check_config(Path(self.path), extra_filters=extra, lenient=self.lenient)
            errors = [problem for problem in problems if problem.severity == "error"]
            if config is None or errors:
                raise ConfigError(errors)
            return config, problems
        if not self.endpoints:
            hint = "`kvproxy init` writes a config.yaml; or give -c FILE, or --endpoint ID=URL once per engine"
            raise ConfigError([Problem("", "nothing to serve", hint)])
        host, port = self.host or _DEFAULT_HOST, _DEFAULT_PORT if self.port is None else self.port
        return load_endpoints(self.endpoints, host=host, port=port, policy=self.policy), []
