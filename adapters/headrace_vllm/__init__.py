"""The ``vllm`` inference engine: vLLM in an environment of its own, as vLLM is released, without patches."""
