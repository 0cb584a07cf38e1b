"""Embedded engines on PyTorch: inference and training of Hugging Face-format decoder models.

Both engines share one model definition (``model``), so a token's log-probability is computed by the
same arithmetic wherever it is computed. This package imports no other engine and, of core, only the
contract and the errors. The plugin classes' own modules stay free of torch until ``start``.
"""
