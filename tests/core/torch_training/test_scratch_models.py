"""A fresh model is a directory that transformers loads, tokenizer included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import ConfigError
from headrace_torch.training import TorchTrainingEngine

DEMO: dict[str, Any] = {
    "architecture": "llama",
    "alphabet": "0123456789abcdefghijklmnopqrstuvwxyz= +-*/.\n",
    "hidden_size": 128,
    "layers": 2,
    "heads": 4,
    "intermediate_size": 344,
    "max_length": 128,
}


@pytest.fixture
def create(tmp_path: Path) -> Any:
    def make(name: str = "model", *, seed: int = 0, **changes: Any) -> Path:
        settings = {n: v for n, v in {**DEMO, **changes}.items() if v is not None}
        TorchTrainingEngine.create_model(str(tmp_path / name), settings=settings, seed=seed)
        return tmp_path / name

    return make


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("changes", [{}, {"kv_heads": 2, "tie_embeddings": False, "vocabulary_size": 77}], ids=str)
def test_transformers_loads_a_fresh_model_of_every_architecture(
    architecture: str, changes: dict[str, Any], create: Any
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(create(architecture=architecture, **changes))
    assert model.config.model_type == architecture
    assert model.config.vocab_size == changes.get("vocabulary_size", 64)
    assert model.config.num_key_value_heads == changes.get("kv_heads", 4)
    assert model.config.tie_word_embeddings == changes.get("tie_embeddings", True)
    assert model.config.max_position_embeddings == 128
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (2, 0)


def test_the_demo_model_has_404096_parameters(create: Any) -> None:
    from transformers import AutoModelForCausalLM

    assert sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(create()).parameters()) == 404_096


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "generation_config.json"])
def test_a_disk_that_is_full_is_an_error_of_the_system(create: Any, tmp_path: Path, file: str) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / file).symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device"):
        create()


def test_weights_that_the_disk_refuses_are_an_error_of_the_system(create: Any, tmp_path: Path) -> None:
    (tmp_path / "model" / "model.safetensors").mkdir(parents=True)
    with pytest.raises(OSError, match="directory"):
        create()


def test_text_goes_through_the_tokenizer_and_back_unchanged(create: Any) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(create())
    text = "".join(reversed(DEMO["alphabet"])) + "  q7bk=\n\n a"
    ids = tokenizer(text).input_ids
    assert ids == [1, *(3 + DEMO["alphabet"].index(character) for character in text)]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert tokenizer.decode([10, 2]) == "7<eos>"


def test_the_same_seed_gives_the_same_weights_and_another_one_others(create: Any) -> None:
    contents = [
        (create(name, seed=seed) / "model.safetensors").read_bytes()
        for name, seed in zip("abc", (1, 1, 2), strict=True)
    ]
    assert contents[0] == contents[1] != contents[2]


def test_the_vocabulary_is_rounded_up_to_a_multiple_of_64(create: Any) -> None:
    sizes = [
        json.loads((create(str(n), alphabet="".join(chr(0x4E00 + i) for i in range(n))) / "config.json").read_text())[
            "vocab_size"
        ]
        for n in (1, 61, 62)
    ]
    assert sizes == [64, 64, 128]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hiden_size": 64}, r"unknown setting 'hiden_size'; known: .*Did you mean 'hidden_size'\?"),
        ({"layers": None}, "layers is missing"),
        ({"architecture": "lama"}, r"unknown architecture 'lama'; known: llama, qwen2, qwen3. Did you mean 'llama'\?"),
        ({"alphabet": "abca"}, "alphabet repeats 'a'"),
        ({"alphabet": ""}, "alphabet is empty"),
        ({"alphabet": 7}, "alphabet is 7, expected a value of type str"),
        ({"heads": 3}, "hidden_size 128 is not an even number for each of 3 heads"),
        ({"kv_heads": 3}, "4 heads cannot share 3 kv_heads"),
        ({"kv_heads": 0}, "kv_heads is 0, expected at least 1"),
        ({"max_length": 128.0}, r"max_length is 128\.0, expected a value of type int"),
        ({"layers": True}, "layers is True, expected a value of type int"),
        ({"tie_embeddings": 1}, "tie_embeddings is 1, expected a value of type bool"),
        ({"vocabulary_size": 40}, "vocabulary_size is 40; special tokens and alphabet need 47"),
    ],
)
def test_a_setting_that_is_unknown_or_impossible_is_refused(
    changes: dict[str, Any], message: str, create: Any, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        create(**changes)
    assert caught.value.origin == "[model.scratch]"
    assert caught.value.fix
    assert not (tmp_path / "model").exists()
    settings = {n: v for n, v in {**DEMO, **changes}.items() if v is not None}
    with pytest.raises(ConfigError, match=message) as checked:
        TorchTrainingEngine.check_model(settings, origin=lambda key: f"job.toml: {key}")
    assert checked.value.origin == f"job.toml: {next(iter(changes))}"


def test_sizes_that_can_work_pass_the_check() -> None:
    TorchTrainingEngine.check_model({**DEMO, "kv_heads": 2}, origin=lambda key: key)
