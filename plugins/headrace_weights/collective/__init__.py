"""Weights by a collective of torch.distributed: the trainer sends once, to all engines that want the version just then.

A group is made for every round and ends with it, so engines join and leave as they like. Whoever's round breaks, for a
member that died in the middle of it, gets what it lacks over the publisher's socket, as the transport ``zmq`` does.
"""
