"""What SGLang imports and a CPU does not need: modules by the names that it imports them by.

This folder is put on the path of SGLang's processes where torch has no CUDA, by :mod:`headrace_sglang.server` alone.
"""
