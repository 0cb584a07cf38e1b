"""What becomes of the memory that a process frees.

For one that receives large messages all its life pages that are made anew for each cost more than to receive it, so
some stay. How many the allocator bounds only at the end of its heap, and a single small object there holds back
everything that was freed before it: above the bound a thread has it give back the free pages in between as well.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

LOOK_SECONDS = 1.0
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGEST_THRESHOLD = 32 << 20
"""Of mallopt: what is larger always comes from the system, and goes back there."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


class _Mallinfo(ctypes.Structure):
    """As glibc has laid it out."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks"),
            "keepcost",
        )
    )


@cache
def keep_freed_memory(nbytes: int) -> None:
    """Have up to ``nbytes`` that this process frees stay with it for what comes next, and give back more within
    ``LOOK_SECONDS``. Call it before threads are started. glibc only, of 2.33 or later for what is given back; elsewhere
    it does nothing.
    """
    mallopt = getattr(_libc, "mallopt", None)
    if mallopt is None:
        return
    mallopt(_M_ARENA_MAX, 1)  # each further one would keep as much, and is given back as soon as it is empty
    mallopt(_M_MMAP_THRESHOLD, min(nbytes, _LARGEST_THRESHOLD))
    mallopt(_M_TRIM_THRESHOLD, nbytes)
    mallinfo = getattr(_libc, "mallinfo2", None)
    if mallinfo is not None:
        mallinfo.restype = _Mallinfo
        threading.Thread(target=_watch, args=(nbytes, mallinfo), name="headrace-freed-memory", daemon=True).start()


def _watch(nbytes: int, mallinfo: Callable[[], _Mallinfo]) -> None:
    """What is resident and not in use is free memory and what the allocator knows nothing of, such as stacks and the
    interpreter's own small objects: the least that was seen of it counts as the latter."""
    assert _libc is not None
    others = _resident() - _in_use(mallinfo())
    while True:
        time.sleep(LOOK_SECONDS)
        spare = _resident() - _in_use(mallinfo())
        if spare - others > nbytes:
            _libc.malloc_trim(ctypes.c_size_t(0))  # all: it can keep some only at the end of the heap
            spare = others = _resident() - _in_use(mallinfo())
        others = max(0, min(others, spare))  # less than nothing where memory was asked for and not yet written


def _resident() -> int:
    """Bytes of this process's own: no files, and no shared memory."""
    resident, shared = Path("/proc/self/statm").read_bytes().split()[1:3]
    return (int(resident) - int(shared)) * _PAGE_BYTES


def _in_use(info: _Mallinfo) -> int:
    return int(info.uordblks + info.hblkhd)
