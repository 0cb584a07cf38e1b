"""The model and its directories, with ``transformers`` as the reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from headrace.errors import EngineError
from headrace_torch.checkpoint import create_weights, load_model, save_model
from headrace_torch.model import Decoder, ModelConfig

SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
REFERENCES = {
    "llama-tied": transformers.LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "llama-biased": transformers.LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True),
    "llama3-rope": transformers.LlamaConfig(**SHAPE, rope_parameters={**LLAMA3_ROPE, "rope_theta": 50000.0}),
    "qwen2": transformers.Qwen2Config(**SHAPE),
    "qwen2-tied": transformers.Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen3": transformers.Qwen3Config(**SHAPE, head_dim=32),
    "qwen3-tied": transformers.Qwen3Config(**SHAPE, head_dim=32, attention_bias=True, tie_word_embeddings=True),
}
TOKENS = torch.from_numpy(np.random.default_rng(0).integers(0, 97, 150))


def reference_model(config: Any, path: Path, **saving: Any) -> Any:
    """A ``transformers`` model whose every parameter is random, biases and norms too, saved to ``path``."""
    generator = torch.Generator().manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(path, **saving)
    return model


def logits_of(model: Decoder, causal: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.logits(model(TOKENS, torch.arange(len(TOKENS)), causal))


def transformers_logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS[None]).logits[0]


@pytest.mark.parametrize("name", REFERENCES)
def test_logits_equal_transformers(name: str, tmp_path: Path, causal: Any) -> None:
    reference = reference_model(REFERENCES[name], tmp_path)
    model = load_model(str(tmp_path), dtype=torch.float32, device="cpu")
    torch.testing.assert_close(logits_of(model, causal), transformers_logits(reference), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("keep_files", [True, False])
def test_transformers_loads_a_saved_model(name: str, keep_files: bool, tmp_path: Path, causal: Any) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    reference_model(REFERENCES[name], source)
    model = load_model(str(source), dtype=torch.float32, device="cpu")
    save_model(model, str(target), like=str(source) if keep_files else None)
    reloaded = transformers.AutoModelForCausalLM.from_pretrained(target)
    torch.testing.assert_close(transformers_logits(reloaded), logits_of(model, causal), atol=1e-5, rtol=0)
    assert ModelConfig.from_directory(str(target)) == model.config


def test_sharded_weights_load_like_one_file(tmp_path: Path, causal: Any) -> None:
    reference = reference_model(REFERENCES["qwen3"], tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    model = load_model(str(tmp_path), dtype=torch.float32, device="cpu")
    torch.testing.assert_close(logits_of(model, causal), transformers_logits(reference), atol=1e-5, rtol=0)


def test_bfloat16_weights_are_kept_and_written_as_bfloat16(tmp_path: Path) -> None:
    reference_model(REFERENCES["llama-tied"], tmp_path / "source")
    model = load_model(str(tmp_path / "source"), dtype=torch.bfloat16, device="cpu")
    save_model(model, str(tmp_path / "target"), like=str(tmp_path / "source"))
    again = load_model(str(tmp_path / "target"), dtype=torch.bfloat16, device="cpu")
    assert json.loads((tmp_path / "target" / "config.json").read_text())["dtype"] == "bfloat16"
    for (name, left), (_, right) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(left, right), name


def test_tokenizer_and_generation_files_are_copied(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    reference_model(REFERENCES["qwen2"], source)
    (source / "tokenizer.json").write_text("{}")
    model = load_model(str(source), dtype=torch.float32, device="cpu")
    save_model(model, str(target), like=str(source))
    assert (target / "tokenizer.json").read_text() == "{}"
    assert (target / "generation_config.json").exists()


def test_a_directory_of_another_model_cannot_be_the_pattern(tmp_path: Path) -> None:
    reference_model(REFERENCES["qwen2"], tmp_path)
    other = Decoder(ModelConfig.from_json(REFERENCES["llama-tied"].to_dict()))
    with pytest.raises(ValueError, match="another model"):
        save_model(other, str(tmp_path / "target"), like=str(tmp_path))


def test_rope_spellings_of_older_transformers_mean_the_same() -> None:
    old = {**SHAPE, "model_type": "llama", "rope_theta": 50000.0, "rope_scaling": {**LLAMA3_ROPE, "type": "llama3"}}
    new = {**SHAPE, "model_type": "llama", "rope_parameters": {**LLAMA3_ROPE, "rope_theta": 50000.0}}
    assert ModelConfig.from_json(old) == ModelConfig.from_json(new)
    assert ModelConfig.from_json(old).rope_theta == 50000.0


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model_type": "gpt2"}, "'gpt2'"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"use_sliding_window": True}, "sliding-window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "'yarn'"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised"),
        ({"num_key_value_heads": 3}, "cannot share"),
    ],
)
def test_a_model_that_cannot_be_computed_exactly_is_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(EngineError, match=told) as caught:
        ModelConfig.from_json({"model_type": "qwen2", **SHAPE, **changes})
    assert caught.value.fix


def test_a_directory_without_a_model_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"config\.json"):
        load_model(str(tmp_path), dtype=torch.float32, device="cpu")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SHAPE}))
    with pytest.raises(EngineError, match="cannot be read") as caught:
        load_model(str(tmp_path), dtype=torch.float32, device="cpu")
    assert "model.safetensors" in caught.value.fix


def test_weights_of_another_shape_or_with_a_tensor_missing_are_refused(tmp_path: Path) -> None:
    reference_model(REFERENCES["qwen2"], tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 98}))
    with pytest.raises(EngineError, match="shape"):
        load_model(str(tmp_path), dtype=torch.float32, device="cpu")
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(EngineError, match=r"missing \['model\.layers\.2"):
        load_model(str(tmp_path), dtype=torch.float32, device="cpu")


def test_fresh_weights_follow_the_seed_and_leave_the_global_random_state_alone() -> None:
    config = ModelConfig.from_json(REFERENCES["qwen2"].to_dict())
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, same, other = Decoder(config), Decoder(config), Decoder(config)
    for model, seed in ((first, 1), (same, 1), (other, 2)):
        create_weights(model, seed)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(first.output_weight, same.output_weight)
    assert not torch.equal(first.output_weight, other.output_weight)
    assert abs(first.model.embed_tokens.weight.std().item() - 0.02) < 1e-3
    assert first.model.norm.weight.eq(1).all()
    assert first.model.layers[0].self_attn.q_proj.bias.eq(0).all()
