"""Training on several ranks: PyTorch's FSDP2 around the model, losses and optimisers of :mod:`headrace_torch`.

The ranks are processes of :mod:`headrace_torch.ranks`. Invariant: no rank has the whole model; a layer is whole while
it is computed, and a tensor while it is published.
"""
