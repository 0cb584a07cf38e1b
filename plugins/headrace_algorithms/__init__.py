"""Algorithms: rewards of whole groups in, per-token advantages, loss weights and a named loss out.

``grpo``, ``variants`` and ``supervised`` hold the plugin classes. ``advantages``, ``aggregation``, ``rows``,
``shaping``, ``whitening`` and ``reporting`` are numpy; ``losses``, ``surrogates``, ``corrections``, ``kl`` and
``mismatch`` are torch and are imported only by name, in the trainer's process. Invariant: whatever the plugins add to a
row depends on that row's group alone, or where ``whitening`` acts on its batch, and never on how the batch is split
afterwards.
"""
