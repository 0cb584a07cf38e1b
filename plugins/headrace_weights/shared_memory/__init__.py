"""Weights in memory that trainer and engines on one host map: written once, by the trainer, and copied by nobody.

The memory has no name. It is handed over as an open file, so that the kernel frees it when the last process that has it
ends, however that ends: a run that is killed leaves nothing in ``/dev/shm``, whose size does not matter either.
"""
