"""The plugin, which starts the ranks.

This module is torch-free: everything behind ``start`` is imported by it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from headrace.contract.setup import Setup
from headrace.contract.training import TrainingCapabilities, TrainingContext
from headrace.errors import EngineError, PluginError
from headrace_megatron.settings import MegatronTrainingSettings
from headrace_torch.device import check_device
from headrace_torch.ranks.others import start_others
from headrace_torch.training import TorchTrainingEngine

if TYPE_CHECKING:
    from headrace_torch.ranks.leader import Leader

SHARD = "headrace_megatron.shard:MegatronShard"
TESTED = "0.19.2"

CPU_SETUP = Setup(
    lock=str(Path(__file__).parent / "locks" / f"megatron-core-{TESTED}.txt"),
    distributions=("megatron-core", "torch", "transformers"),
    python="==3.11.*",
    any_python=True,
    note="for CPUs: the torch of this lock is PyTorch's CPU build, which is not on PyPI: where pip does not find it, "
    f"set PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu. Megatron-Core {TESTED} asks for Python 3.12, and "
    "what is used of it works with 3.11",
)


class MegatronTrainingEngine(TorchTrainingEngine):
    """See the contracts. ``start`` must be called from a thread that lives as long as the engine: the kernel ties the
    other ranks to it."""

    Settings: ClassVar[type[Any]] = MegatronTrainingSettings

    @classmethod
    def setup(cls) -> Setup:
        """For CPUs. On GPUs Megatron-Core is installed as its own page says."""
        return CPU_SETUP

    @classmethod
    def capabilities(cls, settings: Any) -> TrainingCapabilities:
        """No critic, and nothing low-bit: no rank has the whole of a matrix to quantise."""
        return TrainingCapabilities(snapshots=True, scratch=True, dtype=settings.dtype)

    @classmethod
    def preflight(cls, settings: Any, *, directory: str, origin: Callable[[str], str]) -> None:
        """Megatron-Core and the devices must be there."""
        if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
            raise PluginError(
                "training_engine 'megatron' needs Megatron-Core, which this interpreter does not have",
                fix="headrace env create megatron makes an interpreter that has it, for trainer.python; tested: "
                + TESTED,
            )
        check_device(settings.device, origin=origin("device"), count=settings.ranks)

    def _start(self, context: TrainingContext) -> Leader:
        for wanted, what, instead in (
            (context.quantization is not None, "computes with nothing low-bit", "set quantization.align = false"),
            (context.values, "keeps no critic", "choose an algorithm without one"),
        ):
            if wanted:
                raise EngineError(f"this engine {what}", origin=context.name, fix=f'{instead}, or use = "torch"')
        others = start_others(SHARD, self.settings, context)  # they import torch meanwhile
        try:
            from headrace_torch.ranks.leader import Leader

            return Leader(self.settings, context, others)
        except BaseException:  # whatever it was, nobody may be left; raised again
            others.close(kill=True)
            raise
