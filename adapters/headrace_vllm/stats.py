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

    def log_engine_initialized(self) -> None:
        """Nothing to say."""

    def log(self) -> None:
        """Nothing to say."""

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        """Not of interest."""
