"""Whether torch will find the device that a job names, asked without importing torch."""

from __future__ import annotations

import ctypes
from importlib.metadata import PackageNotFoundError, version

from headrace.errors import ConfigError


def check_device(device: str, *, origin: str, count: int = 1) -> None:
    """ConfigError when ``device`` is a GPU and torch cannot have so many. ``origin``: where it was written."""
    problem = _no_gpu(count) if device == "cuda" else ""
    if problem:
        raise ConfigError(
            f'device = "cuda", and {problem}; a device is "cpu" or "cuda"',
            origin=origin,
            fix='set device = "cpu", or run on a machine with a GPU and PyTorch\'s build for it',
        )


def _no_gpu(wanted: int) -> str:
    """Why torch will not see so many GPUs; "" when it will, or nobody can tell."""
    try:
        build = version("torch").partition("+")[2]
    except PackageNotFoundError:
        return "torch is not installed"
    if build == "cpu":
        return "the installed torch is the build for CPUs"
    if build.startswith("rocm"):
        return ""  # finds its GPUs without NVIDIA's driver
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "this machine has no NVIDIA driver"
    count = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return "this machine has no GPU that this process may use"
    if count.value < wanted:
        return f"{wanted} GPUs are needed, one a rank, where this process may use {count.value}"
    return ""
