"""The job's quantisation scheme in its nodes; and weights that are published low-bit by a trainer which computes with
them as they are, when only the rollout is quantised.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from headrace.contract import Array, Quantization, WeightSource
from headrace.contract.quantization import quantized
from headrace.registry import PluginSpec, build


def build_scheme(spec: PluginSpec | None) -> Quantization | None:
    """The scheme of a job, where it has one."""
    if spec is None:
        return None
    scheme = build(spec)
    assert isinstance(scheme, Quantization), "the registry checks the role"
    return scheme


class LowBitSource(WeightSource):
    """The parts of what ``scheme`` covers in ``source``, and all else as it is."""

    def __init__(self, source: WeightSource, scheme: Quantization) -> None:
        self._source = source
        self._scheme = scheme

    def tensors(self) -> Iterator[tuple[str, Array]]:
        """See :class:`WeightSource`. ContractError when the scheme makes something else of a tensor."""
        for name, tensor in self._source.tensors():
            if self._scheme.covers(name, shape=tensor.shape):
                yield from quantized(self._scheme, name, tensor.astype(np.float32)).items()
            else:
                yield name, tensor
