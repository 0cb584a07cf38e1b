"""Internals of the training engine: packed forward, losses, optimiser steps, exact resume.

Imported only once an engine starts. Invariant: what a row contributes to a gradient depends neither on the
micro-batch it travels in nor on how its computation is shared.
"""
