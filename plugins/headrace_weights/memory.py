"""Memory for tensors that are handed out, used again when nobody has them any more.

Memory that is fresh from the system costs several times the copy into it: the first touch of every page is a fault.
"""

from __future__ import annotations

import mmap
import threading
import weakref

import numpy as np

from headrace.contract import Array

_SMALL = 1 << 16
"""Bytes up to which the allocator of numpy keeps memory itself."""


class Buffers:
    """Arrays of bytes. Up to ``spare_bytes`` of those that nobody has a view of any more are kept to be used again."""

    def __init__(self, spare_bytes: int) -> None:
        self._spare_bytes = spare_bytes
        self._spare: list[mmap.mmap] = []
        self._lock = threading.RLock()  # arrays end wherever they end, also while this thread holds the lock

    def take(self, nbytes: int) -> Array:
        """uint8 [nbytes], of any content, that is nobody else's as long as it or a view of it is alive."""
        if nbytes <= _SMALL:
            return np.empty(nbytes, np.uint8)
        memory = self._found(nbytes) or mmap.mmap(-1, nbytes)
        array: Array = np.frombuffer(memory, np.uint8)
        weakref.finalize(array, self._give, memory).atexit = False
        return array

    def _found(self, nbytes: int) -> mmap.mmap | None:
        with self._lock:
            found = next((memory for memory in self._spare if len(memory) == nbytes), None)
            if found is not None:
                self._spare.remove(found)
            return found

    def _give(self, memory: mmap.mmap) -> None:
        with self._lock:
            self._spare.append(memory)
            while sum(map(len, self._spare)) > self._spare_bytes:  # the oldest fit least what is asked for now
                self._spare.pop(0)
