"""Whether the job's processes can reach each other the way ``[network]`` says."""

from __future__ import annotations

import ipaddress
import socket

from headrace.config.schema import Job
from headrace.errors import ConfigError


def check_network(job: Job) -> list[ConfigError]:
    """Tries to bind the host, on a port that the system chooses."""
    problem = _unusable(job.network.host) if job.network.transport == "tcp" else ""
    if not problem:
        return []
    fix = 'write an IP address of this machine, such as "127.0.0.1"; the command "ip address" lists them'
    origin = job.origin(("network", "host"), ("network", "transport"))
    return [ConfigError(problem, origin=origin, fix=fix)]


def _unusable(host: str) -> str:
    """Why nodes cannot serve at ``host``; "" when they can."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return f"host {host!r} is not an IP address"
    if address.is_unspecified:
        return f"host {host} means every address of this machine, but nodes are reached at one"
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((host, 0))
    except OSError as error:
        return f"nodes cannot listen on host {host}: {error.strerror}"
    return ""
