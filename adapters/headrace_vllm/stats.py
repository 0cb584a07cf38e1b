"""What vLLM's scheduler says of itself, kept as the latest numbers."""

from __future__ import annotations

from typing import Any


class LatestStats:
    """A stat logger of vLLM; names that a release lacks count as 0."""

    def __init__(self) -> None:
        self.running = 0
        self.kv_used = 0.0
        self.prefilled_tokens = 0
        self.preemptions = 0

    def record(
        self,
        scheduler_stats: Any = None,
        iteration_stats: Any = None,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """After each step."""
        if scheduler_stats is not None:
            self.running = int(getattr(scheduler_stats, "num_running_reqs", 0))
            self.kv_used = float(getattr(scheduler_stats, "kv_cache_usage", 0.0))
        if iteration_stats is not None:
            prompts = getattr(iteration_stats, "prompt_token_stats", None)
            self.prefilled_tokens += int(getattr(prompts, "computed", 0))
            self.preemptions += int(getattr(iteration_stats, "num_preempted_reqs", 0))

    def read(self, metrics: str) -> None:
        """What a server says of itself at ``/metrics``, in Prometheus' text format."""
        self.running = int(_sum(metrics, "vllm:num_requests_running"))
        self.kv_used = _sum(metrics, "vllm:kv_cache_usage_perc")
        self.prefilled_tokens = int(_sum(metrics, "vllm:prompt_tokens_by_source_total", label='source="local_compute"'))
        self.preemptions = int(_sum(metrics, "vllm:num_preemptions_total"))

    def log_engine_initialized(self) -> None:
        """Nothing to say."""

    def log(self) -> None:
        """Nothing to say."""

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        """Not of interest."""


def _sum(metrics: str, name: str, *, label: str = "") -> float:
    """Over the lines of a name that have the label."""
    lines = [line for line in metrics.splitlines() if line.startswith(name + "{") and label in line]
    return sum(float(line.rpartition(" ")[2]) for line in lines)
