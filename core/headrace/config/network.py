"""Whether the job's processes can reach each other the way ``[network]`` says."""

from __future__ import annotations

import ipaddress
import os
import socket
from importlib.util import find_spec
from pathlib import Path

from headrace.config.schema import Job
from headrace.errors import ConfigError, HeadraceError, PluginError
from headrace.process import is_listened_at

UNIX = "unix:"
"""Before the path of a socket in the file system."""
_IN_USE = "it is in use by another process"


def check_network(job: Job) -> list[HeadraceError]:
    """Tries to bind the host, on a port that the system chooses, and where metrics are to be served."""
    return [*_check_host(job), *_check_metrics(job)]


def _check_metrics(job: Job) -> list[HeadraceError]:
    try:
        if job.network.metrics:
            check_listen(job.network.metrics)
            _check_free(job.network.metrics)
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
        raise ConfigError(
            f"metrics cannot be served at {listen!r}: it is neither HOST:PORT, with a port below 65536, nor unix:PATH",
            origin=f"metrics = {listen!r}",
            fix="say HOST:PORT, as in 127.0.0.1:9464, or unix:PATH",
        )
    if find_spec("prometheus_client") is None:
        raise PluginError("metrics need prometheus_client", fix='pip install "headrace[metrics]"')


def unserved(listen: str, reason: str) -> ConfigError:
    """Metrics cannot be served at ``listen``."""
    return ConfigError(
        f"metrics cannot be served at {listen}: {reason}",
        origin=f"metrics = {listen!r}",
        fix="choose a port or path that is free",
    )


def check_unshared(listen: str) -> None:
    """ConfigError for a socket of the file system at which another process serves: it would be taken over."""
    if listen.startswith(UNIX) and is_listened_at(listen.removeprefix(UNIX)):
        raise unserved(listen, _IN_USE)


def _check_free(listen: str) -> None:
    """ConfigError where nobody could listen now."""
    host, _, port = listen.rpartition(":")
    unix = listen.startswith(UNIX)
    if problem := _path_problem(Path(listen.removeprefix(UNIX))) if unix else _port_problem(host.strip("[]"), port):
        raise unserved(listen, problem)


def _port_problem(host: str, port: str) -> str:
    """Why ``port`` cannot be had; "" when it can."""
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as asyncio's servers have it
                probe.bind(address)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _path_problem(path: Path) -> str:
    """Why no socket can be made at ``path``; "" when one can. One that is there, and at which nobody listens any more,
    is replaced, whoever made it."""
    if is_listened_at(str(path)):
        return _IN_USE
    if path.exists() and not path.is_socket():
        return "there is something else"
    if not path.parent.is_dir():
        return f"{path.parent} is not a folder"
    return "" if os.access(path.parent, os.W_OK | os.X_OK) else f"{path.parent} is not writable"
