"""Quantisation schemes: which weights become low-bit, and how."""
