"""All that is used of Megatron-Core, in one place; without a GPU, with the stand-in of :mod:`headrace_megatron.cpu`.

Importing this imports Megatron, whose modules warn of what they would like to have besides.
"""

from __future__ import annotations

import logging
import queue
import warnings

with warnings.catch_warnings(action="ignore"):
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer.distrib_optimizer import HAVE_APEX_OR_TE
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module

    from headrace_megatron import cpu

    cpu.install()

# Where a save's threads leave what they wrote; Megatron would start a process for it, which nobody ends.
filesystem_async._results_queue = queue.SimpleQueue()
logging.getLogger("megatron").setLevel(logging.ERROR)  # it tells of every bucket, and that other models are newer

__all__ = [
    "HAVE_APEX_OR_TE",
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "Float16Module",
    "GPTModel",
    "OptimizerConfig",
    "ShardedTensor",
    "TransformerConfig",
    "dist_checkpointing",
    "finalize_model_grads",
    "get_forward_backward_func",
    "get_gpt_layer_local_spec",
    "get_megatron_optimizer",
    "model_parallel_cuda_manual_seed",
    "nested_values",
    "parallel_state",
    "reduce_from_tensor_model_parallel_region",
]
