"""Low-bit linear layers: what trainer and engine multiply by when a job is quantised.

``weight`` holds a layer's low-bit tensors, ``kernels`` multiplies, ``straight_through`` differentiates; ``layers``
gives a model the low-bit form of its own weights, ``arriving`` what a trainer has published. Invariant: trainer and
engine multiply by the same function of the same tensors, and where all of it is integers (``int8`` by ``int8``) they
get the same sums to the bit, however many tokens they have at a time.
"""
