"""Headrace: an engine-agnostic orchestration core for asynchronous RL post-training."""

__version__ = "0.1.0"
