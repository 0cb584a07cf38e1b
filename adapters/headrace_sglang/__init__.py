"""The ``sglang`` inference engine: SGLang's server in processes of its own, as SGLang is released, without patches."""
