"""Names by which the adapter and what it has SGLang load in its own processes know each other."""

SAMPLING_BACKEND = "headrace"
"""Of the sampler (:mod:`headrace_sglang.sampling`): an argument of SGLang's server."""
