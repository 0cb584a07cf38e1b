"""What engines of several processes share: rank 0 leads, the others do what it tells them.

A trainer is one node, and its process is rank 0. The other ranks are processes that it starts, speaks with over a
socket that has no name, and takes along when it ends, however that happens; core knows of one process. An engine gives
its :class:`~headrace_torch.ranks.orders.Shard`, which is one rank's part of the model. Invariant: all ranks do the same
orders in the same order, so that every collective finds its partners.
"""
