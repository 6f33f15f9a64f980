"""The command `kvproxy picker`, as its help shows it."""

from __future__ import annotations

import argparse

from kvproxy.operate.commands.options import Command, add_config_option, add_engine_arguments


def add_options(picker: argparse.ArgumentParser) -> None:
    """Add the configuration, the listener and the engines."""
    add_config_option(picker)
    picker.add_argument("--host", help="address of its listener (else `picker.host`: 127.0.0.1)")
    picker.add_argument("--port", type=int, help="its port (else `picker.port`: 9002); 0 takes a free one")
    add_engine_arguments(picker)
    picker.add_argument("--policy", help="balancing policy (without a file)")


COMMANDS = (
    Command(
        name="picker",
        group="Gateways and shells",
        help="decide for Envoy, which carries the requests (endpoint picker, gRPC)",
        description="Answers Envoy's external processing (Gateway API endpoint picker protocol) until SIGTERM. "
        "Needs kvproxy[picker].",
        examples=("kvproxy picker -c config.yaml",),
        add_options=add_options,
        run="kvproxy.features.picker.command:main",
    ),
)
