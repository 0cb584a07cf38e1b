"""The rules of the role, on a tiny model of `transformers`."""

import pytest
from engine import OwnEngine
from transformers import LlamaConfig, LlamaForCausalLM

from headrace.testing.suites import InferenceEngineContract


class TestOwnEngine(InferenceEngineContract):
    @pytest.fixture
    def plugin(self):
        return OwnEngine(OwnEngine.Settings(slots=4))

    @pytest.fixture
    def model_path(self, tmp_path):
        config = LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=256,
            initializer_range=0.5,
        )
        LlamaForCausalLM(config).save_pretrained(tmp_path)
        return str(tmp_path)
