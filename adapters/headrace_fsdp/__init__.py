"""Training on several ranks: PyTorch's FSDP2 around the model, losses and optimisers of :mod:`headrace_torch`.

A trainer is one node, and its process is rank 0. The other ranks are processes that it starts, speaks with over a
socket that has no name, and takes along when it ends, however that happens; core knows of one process. Invariant: all
ranks do the same orders in the same order, so that every collective finds its partners.
"""
