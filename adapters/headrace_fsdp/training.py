"""The plugin, which starts the ranks.

This module is torch-free: everything behind ``start`` is imported by it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from headrace.contract.training import TrainingCapabilities, TrainingContext
from headrace.errors import EngineError
from headrace_fsdp.settings import FsdpTrainingSettings
from headrace_torch.device import check_device
from headrace_torch.ranks.others import start_others
from headrace_torch.training import TorchTrainingEngine

if TYPE_CHECKING:
    from headrace_torch.ranks.leader import Leader

SHARD = "headrace_fsdp.shard:Shard"


class FsdpTrainingEngine(TorchTrainingEngine):
    """See the contracts. ``start`` must be called from a thread that lives as long as the engine: the kernel ties the
    other ranks to it."""

    Settings: ClassVar[type[Any]] = FsdpTrainingSettings

    @classmethod
    def capabilities(cls, settings: Any) -> TrainingCapabilities:
        """As the torch engine, but nothing low-bit: no rank has the whole of a matrix to quantise."""
        return TrainingCapabilities(snapshots=True, scratch=True, values=True, dtype=settings.dtype)

    @classmethod
    def preflight(cls, settings: Any, *, directory: str, origin: Callable[[str], str]) -> None:
        """The devices must be there."""
        check_device(settings.device, origin=origin("device"), count=settings.ranks)

    def _start(self, context: TrainingContext) -> Leader:
        if context.quantization is not None:
            raise EngineError(
                "this engine computes with nothing low-bit",
                origin=context.name,
                fix='set quantization.align = false, or use = "torch"',
            )
        others = start_others(SHARD, self.settings, context)  # they import torch meanwhile
        try:
            from headrace_torch.ranks.leader import Leader

            return Leader(self.settings, context, others)
        except BaseException:  # whatever it was, nobody may be left; raised again
            others.close(kill=True)
            raise
