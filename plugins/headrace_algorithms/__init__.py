"""Algorithms: rewards of whole groups in, per-token advantages, loss weights and a named loss out.

``grpo``, ``variants``, ``ppo`` and ``supervised`` hold the plugin classes; ``policy`` is what all but the last share.
``advantages``, ``aggregation``, ``gae``, ``rows``, ``shaping``, ``whitening`` and ``reporting`` are numpy; ``losses``,
``surrogates``, ``corrections``, ``kl``, ``critic`` and ``mismatch`` are torch and are imported only by name, in the
trainer's process. Invariant: whatever the plugins add to a row depends on that row's group alone, or where
``whitening`` acts on its batch, and never on how the batch is split afterwards.
"""
