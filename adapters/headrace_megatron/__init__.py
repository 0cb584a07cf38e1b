"""Training with Megatron-Core: tensor, pipeline, expert and data parallel ranks, and its distributed optimizer.

The ranks are processes of :mod:`headrace_torch.ranks`; losses are those of :mod:`headrace_torch`, called inside
Megatron's pipeline schedule. Invariant: weights come in and go out by their Hugging Face names, bit for bit.
"""
