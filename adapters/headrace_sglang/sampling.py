"""How tokens are drawn in SGLang's own processes: as the contract of inference engines says.

SGLang draws by a request's seed only under its deterministic attention kernels, which CPUs do not have, and tells
log-probs of greedy requests untempered. It takes samplers from outside by name; this is one.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.sampler import Sampler

from headrace_sglang.drawing import draw


class SeededSampler(Sampler):  # type: ignore[misc]  # types are checked where SGLang is not installed
    """Temperature alone: nothing is cut off a distribution. ``top_k`` 1 is greedy."""

    def forward(
        self,
        logits_output: Any,
        sampling_info: Any,
        return_logprob: bool,
        top_logprobs_nums: list[int],
        token_ids_logprobs: list[Any],
        positions: torch.Tensor,
        **_: Any,
    ) -> torch.Tensor:
        """int32 [N]: tokens drawn from ``logits_output.next_token_logits`` [N, V]; the log-probs asked for are written
        to it. ``positions``: [N], of the token before."""
        logits = self._preprocess_logits(logits_output.next_token_logits, sampling_info)
        logprobs = torch.log_softmax(logits.float() / sampling_info.temperatures, dim=-1)
        drawn = draw(logprobs, sampling_info.sampling_seed, positions)
        tokens = torch.where(sampling_info.top_ks == 1, logprobs.argmax(dim=-1), drawn).to(torch.int32)
        if return_logprob:
            found = self.output_logprob_processor.compute_logprobs(
                logprobs, top_logprobs_nums, token_ids_logprobs, tokens
            )
            found.write_output_to(logits_output)
        self._sync_token_ids_across_tp(tokens, sampling_info)
        return tokens
