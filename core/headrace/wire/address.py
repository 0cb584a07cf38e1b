"""Addresses: ipc sockets in a private directory on one host, tcp with keys across hosts, nothing else.

Invariant: no address that this module lets through can be reached by someone who is neither the owner of the
directory nor a holder of the run's keys.
"""

from __future__ import annotations

import os
import stat

from headrace.errors import WireError
from headrace.process import is_listened_at
from headrace.wire.keys import Keys

_PATH_BYTES = 107
"""Linux: sun_path holds 108 bytes, the last one is NUL."""


def ipc_address(directory: str, name: str) -> str:
    """``ipc://directory/name.sock``. WireError when others could reach it or the path is too long."""
    path = os.path.join(os.path.abspath(directory), f"{name}.sock")
    _check_ipc(path)
    return f"ipc://{path}"


def tcp_address(host: str, port: int = 0) -> str:
    """``tcp://host:port``; port 0 lets the system choose, and ``Server.start`` says what it chose."""
    return f"tcp://{f'[{host}]' if ':' in host else host}:{port}"


def check_address(address: str, *, keys: Keys | None) -> None:
    """WireError when an address is not as safe as this module promises."""
    scheme, _, rest = address.partition("://")
    if scheme == "ipc" and rest:
        _check_ipc(rest)
    elif scheme == "tcp" and rest:
        if keys is None:
            raise WireError(
                f"{address} without keys: anybody who reaches the port could talk to this run",
                fix="pass Keys, or use an ipc address on one host",
            )
    else:
        raise WireError(f"address {address!r} is neither ipc nor tcp", fix="use ipc_address or tcp_address")


def check_free(address: str) -> None:
    """WireError when somebody listens on an ipc address already: a second bind would silently take it over."""
    if address.startswith("ipc://") and is_listened_at(address.removeprefix("ipc://")):
        raise WireError(
            f"{address} is in use by another process", fix="end the run that uses this directory, or take another one"
        )


def _check_ipc(path: str) -> None:
    directory = os.path.dirname(path)
    if len(os.fsencode(path)) > _PATH_BYTES:
        raise WireError(
            f"socket path {path!r} has {len(os.fsencode(path))} bytes, the system allows {_PATH_BYTES}",
            fix="put the run's socket directory at a shorter path",
        )
    try:
        mode = stat.S_IMODE(os.stat(directory).st_mode)
    except OSError as error:
        raise WireError(f"socket directory {directory!r} cannot be used: {error.strerror}", fix="create it") from error
    if mode & 0o077:
        raise WireError(
            f"socket directory {directory!r} has mode {mode:04o}: other users could reach its sockets",
            fix=f"chmod 700 {directory}",
        )
