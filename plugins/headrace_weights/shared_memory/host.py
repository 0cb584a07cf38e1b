"""Who is on this host, and may read this user's memory."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

_CREDENTIALS = struct.Struct("3i")
"""pid, uid, gid of a socket's other end (unix(7), SO_PEERCRED)."""


def this_host() -> str:
    """The same for all containers of a machine, and another one after it was started anew."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def is_own_user(connection: socket.socket) -> bool:
    """Whether the other end is a process of this user."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid: int = _CREDENTIALS.unpack(data)[1]
    return uid == os.getuid()
