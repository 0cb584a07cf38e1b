"""Temperatures that vLLM's own parameter cannot say, as a logits processor of vLLM.

vLLM refuses temperatures above 2 and reports the log-probs of greedy requests untempered. Loaded by vLLM in its own
processes, by the name in :mod:`headrace_vllm.names`.
"""

from __future__ import annotations

import math
from typing import Any

from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from headrace_vllm.names import TEMPERATURE


class Tempering(AdapterLogitsProcessor):  # type: ignore[misc]  # types are checked where vLLM is not installed
    """Divides a request's logits by ``extra_args["headrace_temperature"]``, before vLLM does anything with them."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """ValueError for what is no temperature."""
        value = _temperature(sampling_params)
        if value is not None and not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
            raise ValueError(f"{TEMPERATURE} must be a number > 0, got {value!r}")

    def is_argmax_invariant(self) -> bool:
        """It is; but what is, vLLM leaves out for greedy requests, whose log-probs it is for."""
        return False

    def new_req_logits_processor(self, params: Any) -> Any:
        """None for requests that do not ask for it."""
        value = _temperature(params)
        if value is None:
            return None

        def temper(output_ids: list[int], logits: Any) -> Any:
            return logits / value

        return temper


def _temperature(params: Any) -> Any:
    return (params.extra_args or {}).get(TEMPERATURE)
