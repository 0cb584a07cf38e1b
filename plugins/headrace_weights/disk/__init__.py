"""Weights in files, for engines that share nothing with the trainer but a folder.

A version is one file: all tensors in the safetensors format, or what differs from the last such file. So an engine that
comes late, or has slept for many versions, reads two files at most.
"""
