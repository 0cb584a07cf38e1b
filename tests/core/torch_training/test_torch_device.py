"""A device that is not there is refused before anything starts, without importing torch."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest

from headrace.contract import InferenceEngine, TrainingEngine
from headrace.errors import ConfigError
from headrace_fsdp.training import FsdpTrainingEngine
from headrace_torch import device
from headrace_torch.inference import TorchInferenceEngine
from headrace_torch.training import TorchTrainingEngine


class Driver(SimpleNamespace):
    """libcuda, of a machine with so many GPUs."""

    gpus: int

    def cuInit(self, flags: int) -> int:  # the driver's name
        return 0

    def cuDeviceGetCount(self, count: object) -> int:  # the driver's name
        count._obj.value = self.gpus  # type: ignore[attr-defined]  # what byref points to
        return 0


def absent(name: str) -> Driver:
    raise OSError(name)


@pytest.mark.parametrize("engine", [TorchInferenceEngine, TorchTrainingEngine])
@pytest.mark.parametrize(
    ("build", "driver", "problem"),
    [
        ("2.13.0+cpu", lambda name: Driver(gpus=1), "the installed torch is the build for CPUs"),
        ("2.13.0", absent, "this machine has no NVIDIA driver"),
        ("2.13.0+cu130", lambda name: Driver(gpus=0), "this machine has no GPU that this process may use"),
        ("2.13.0+cu130", lambda name: Driver(gpus=1), ""),
        ("2.13.0", lambda name: Driver(gpus=8), ""),
        ("2.13.0+rocm7.0", absent, ""),
    ],
)
def test_a_gpu_that_torch_cannot_have_is_refused_where_it_is_named(
    monkeypatch: pytest.MonkeyPatch,
    engine: type[InferenceEngine | TrainingEngine],
    build: str,
    driver: object,
    problem: str,
) -> None:
    monkeypatch.setattr(device, "version", lambda name: build)
    monkeypatch.setattr(ctypes, "CDLL", driver)
    engine.preflight(engine.Settings(device="cpu"), directory=".", origin=str)
    if not problem:
        engine.preflight(engine.Settings(device="cuda"), directory=".", origin=str)
        return
    with pytest.raises(ConfigError, match=problem) as caught:
        engine.preflight(engine.Settings(device="cuda"), directory=".", origin=lambda key: f"job.toml:3  {key}")
    assert caught.value.origin == "job.toml:3  device"
    assert 'set device = "cpu"' in caught.value.fix


def test_every_rank_needs_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "version", lambda name: "2.13.0+cu130")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver(gpus=2))
    for ranks in (1, 2):
        settings = FsdpTrainingEngine.Settings(device="cuda", ranks=ranks)
        FsdpTrainingEngine.preflight(settings, directory=".", origin=str)
    with pytest.raises(ConfigError, match=r"4 GPUs are needed, one a rank, where this process may use 2"):
        FsdpTrainingEngine.preflight(
            FsdpTrainingEngine.Settings(device="cuda", ranks=4), directory=".", origin=lambda key: f"job.toml:3  {key}"
        )
