"""Whether the job's processes can reach each other the way ``[network]`` says."""

from __future__ import annotations

import ipaddress
import socket
from importlib.util import find_spec

from headrace.config.schema import Job
from headrace.errors import ConfigError, HeadraceError, PluginError

UNIX = "unix:"
"""Before the path of a socket in the file system."""


def check_network(job: Job) -> list[HeadraceError]:
    """Tries to bind the host, on a port that the system chooses."""
    return [*_check_host(job), *_check_metrics(job)]


def _check_metrics(job: Job) -> list[HeadraceError]:
    try:
        if job.network.metrics:
            check_listen(job.network.metrics)
    except HeadraceError as error:
        error.origin = job.origin(("network", "metrics"))
        return [error]
    return []


def _check_host(job: Job) -> list[HeadraceError]:
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


def check_listen(listen: str) -> None:
    """ConfigError for what is no place to serve metrics at; PluginError when what serves them is not installed."""
    host, _, port = listen.rpartition(":")
    place = listen.removeprefix(UNIX) if listen.startswith(UNIX) else host and port.isdigit() and int(port) < 1 << 16
    if not place:
        raise ConfigError(f"metrics at {listen!r}", fix="say HOST:PORT, as in 127.0.0.1:9464, or unix:PATH")
    if find_spec("prometheus_client") is None:
        raise PluginError("metrics need prometheus_client", fix='pip install "headrace[metrics]"')
