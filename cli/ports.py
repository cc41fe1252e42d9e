"""Whether the ports that a command needs can be had, before it starts anything."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from cli.problems import CommandError


def check_ports(ports: Mapping[str, tuple[str, int]]) -> None:
    """Maps settings' keys to host and port. Raises `CommandError` for the first one that cannot be had."""
    for key, (host, port) in ports.items():
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family) as probe:
            # As the servers do: connections of an earlier run that linger do not count.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                variable = "SHEAF_" + key.partition(" ")[0].upper().replace(".", "__")
                raise CommandError(
                    f"port {port} on {host} ({key}) cannot be had: {error.strerror}; "
                    f"stop what uses it, or set {variable} to another"
                ) from None
