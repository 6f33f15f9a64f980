"""Whether an endpoint's address is one the proxy itself listens on."""

from __future__ import annotations

import ipaddress
import socket

from kvproxy.config.addresses import is_loopback
from kvproxy.config.schema import Config

_EVERY = frozenset({"0.0.0.0", "::"})


def listener_at(origin: tuple[str, str, int, str], config: Config) -> str:
    """`listen` or `admin` when that listener would answer at this origin (as `same_origin` tells it); else "".

    Names are not resolved, save for `localhost` and this machine's own.
    """
    _, host, port, _ = origin
    listeners = [("listen", config.listen.host, config.listen.port)]
    if config.admin.enabled:
        listeners.append(("admin", config.admin.host, config.admin.port))
    for name, bound, own_port in listeners:
        if own_port == port and _reaches(host, bound.casefold()):
            return name
    return ""


def _reaches(host: str, bound: str) -> bool:
    if bound in _EVERY:
        return _is_this_machine(host)
    if "localhost" in (host, bound):
        return is_loopback(host) and is_loopback(bound)
    return _canonical(host) == _canonical(bound)


def _canonical(host: str) -> str:
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return host


def _is_this_machine(host: str) -> bool:
    if host in _EVERY or is_loopback(host) or host == socket.gethostname().casefold():
        return True
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))  # only an address of this machine can be bound
    except (ValueError, OSError):
        return False
    return True
