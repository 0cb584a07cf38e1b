"""Muon for matrices that are in parts: orthogonalising one needs all of it.

Every matrix is made whole on all ranks, and orthogonalised on one of them in turn. Invariant: a matrix's update does
not depend on how many ranks there are, but for rounding.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from headrace_torch.trainer.muon import Muon, orthogonalised


class ShardedMuon(Muon):
    """Of :class:`DTensor` parameters on one mesh."""

    def orthogonalised(self, matrices: list[Tensor]) -> list[Tensor]:
        """See :class:`Muon`; collective."""
        found = []
        ranks, rank = dist.get_world_size(), dist.get_rank()
        for start in range(0, len(matrices), ranks):
            whole = [_whole(matrix) for matrix in matrices[start : start + ranks]]
            for owner, matrix in enumerate(whole):
                if owner == rank:
                    matrix.copy_(orthogonalised(matrix.unsqueeze(0)).squeeze(0))
            for owner, matrix in enumerate(whole):
                dist.broadcast(matrix, owner)
                found.append(_in_parts(matrix, like=matrices[start + owner]))
        return found


def _whole(matrix: Tensor) -> Tensor:
    assert isinstance(matrix, DTensor)
    return torch.clone(matrix.full_tensor())


def _in_parts(matrix: Tensor, *, like: Tensor) -> Tensor:
    assert isinstance(like, DTensor)
    return distribute_tensor(matrix, like.device_mesh, like.placements, src_data_rank=None)
