"""Packed log-probs and entropies are those of the model run row by row, and transformers agrees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from headrace.contract import Batch, TrainingContext
from headrace.contract.columns import TOKENS
from headrace.errors import ConfigError, EngineError
from headrace_torch.trainer import core, scoring
from headrace_torch.training import TorchTrainingEngine, TorchTrainingSettings

KINDS: list[dict[str, Any]] = [
    {},
    {"kv_heads": 4, "tie_embeddings": False},
    {"architecture": "qwen2"},
    {"architecture": "qwen3"},
]
LENGTHS = [3, 5, 2, 17, 9, 40, 33, 4]


@pytest.fixture
def reference() -> Callable[..., tuple[list[np.ndarray[Any, Any]], list[np.ndarray[Any, Any]]]]:
    """Log-probs and entropies of each row's tokens but the first, by transformers, one row at a time."""

    def compute(path: str, batch: Batch, temperature: float = 1.0) -> Any:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        logprobs, entropies = [], []
        for row in batch.ragged(TOKENS):
            ids = torch.from_numpy(row.astype(np.int64))
            with torch.no_grad():
                table = (model(ids[None]).logits[0, :-1] / temperature).log_softmax(-1)
            logprobs.append(table.gather(1, ids[1:, None]).squeeze(1).numpy())
            entropies.append(-(table.exp() * table).sum(-1).numpy())
        return logprobs, entropies

    return compute


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_packed_logprobs_and_entropies_are_those_of_transformers_row_by_row(
    kind: dict[str, Any], engine: Any, model: Any, batch: Any, reference: Any
) -> None:
    path, rows = model(**kind), batch(LENGTHS)
    found = engine(path).forward(rows, outputs=("logprobs", "entropy"), temperature=0.7)
    logprobs, entropies = reference(path, rows, temperature=0.7)
    np.testing.assert_allclose(np.concatenate([r[1:] for r in found["logprobs"]]), np.concatenate(logprobs), atol=1e-5)
    np.testing.assert_allclose(np.concatenate([r[1:] for r in found["entropy"]]), np.concatenate(entropies), atol=1e-5)


def test_rows_that_share_a_beginning_get_the_logprobs_they_get_alone(engine: Any, rows: Any) -> None:
    shared = [[1, 9, 8, 7, 4, 5], [1, 9, 8, 7, 4, 6, 3], [1, 9, 8, 7], [1, 9, 8, 7, 4, 5], [1, 9, 8, 7, 4]]
    one = engine()
    together = one.forward(rows(shared))["logprobs"]
    for row, tokens in zip(together, shared, strict=True):
        np.testing.assert_allclose(row, one.forward(rows([tokens]))["logprobs"].values, atol=1e-5)


def test_a_long_batch_is_computed_in_passes(engine: Any, batch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one, rows = engine(), batch(LENGTHS)
    whole = one.forward(rows)["logprobs"].values
    monkeypatch.setattr(core, "FORWARD_TOKENS", 20)
    np.testing.assert_allclose(one.forward(rows)["logprobs"].values, whole, atol=1e-5)


def test_a_large_vocabulary_is_computed_in_chunks_with_the_same_result(
    engine: Any, batch: Any, spec: Any, gradient: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, rows, loss = engine(), batch([20, 20, 20]), spec(entropy=True)
    whole = one.forward(rows, outputs=("logprobs", "entropy"))
    slope = gradient(one, loss, [rows])
    monkeypatch.setattr(scoring, "LOGIT_BUDGET", 7 * 64)
    chunked = one.forward(rows, outputs=("logprobs", "entropy"))
    for name, column in whole.items():
        np.testing.assert_allclose(chunked[name].values, column.values, atol=1e-6)
    np.testing.assert_allclose(gradient(one, loss, [rows]), slope, atol=1e-6 * np.abs(slope).max())


def test_a_batch_without_trainable_tokens_has_zeros(engine: Any, rows: Any) -> None:
    one = engine()
    assert one.forward(rows([[1, 4], [1]], prompt=9))["logprobs"].values.tolist() == [0.0, 0.0, 0.0]
    assert len(one.forward(rows([]))["logprobs"]) == 0


def test_a_snapshot_keeps_its_weights_while_training_goes_on(engine: Any, batch: Any, spec: Any, train: Any) -> None:
    one, rows = engine(), batch([6, 7, 8])
    before = one.forward(rows)["logprobs"].values
    one.snapshot("reference")
    train(one, spec(), rows)
    assert np.array_equal(one.forward(rows, weights="reference")["logprobs"].values, before)
    assert not np.allclose(one.forward(rows)["logprobs"].values, before, atol=1e-3)
    one.snapshot("reference")
    assert np.array_equal(
        one.forward(rows, weights="reference")["logprobs"].values, one.forward(rows)["logprobs"].values
    )
    one.drop_snapshot("reference")
    one.drop_snapshot("reference")
    with pytest.raises(ValueError, match="no snapshot 'reference'"):
        one.forward(rows, weights="reference")


def test_current_is_no_name_for_a_snapshot(engine: Any) -> None:
    with pytest.raises(ValueError, match="'current' names the weights being trained"):
        engine().snapshot("current")


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf")])
def test_a_temperature_that_tempers_nothing_is_refused(temperature: float, engine: Any, batch: Any, spec: Any) -> None:
    one = engine()
    with pytest.raises(ConfigError, match="temperature"):
        one.forward(batch([3]), temperature=temperature)
    with pytest.raises(ConfigError, match="temperature"):
        one.begin_step(spec(temperature=temperature))


def test_bfloat16_computes_and_exports_bfloat16_and_is_close(engine: Any, model: Any, batch: Any) -> None:
    path, rows = model(), batch(LENGTHS)
    exact = engine(path).forward(rows)["logprobs"].values
    rounded = engine(path, dtype="bfloat16")
    assert {str(array.dtype) for _, array in rounded.weight_source().tensors()} == {"bfloat16"}
    np.testing.assert_allclose(rounded.forward(rows)["logprobs"].values, exact, atol=0.3)
    assert np.abs(rounded.forward(rows)["logprobs"].values - exact).mean() < 0.05


def test_weights_are_views_under_hugging_face_names_tied_ones_once(engine: Any, model: Any, weights: Any) -> None:
    from safetensors.numpy import load_file

    one = engine(model())
    stored = load_file(f"{model()}/model.safetensors")
    found = weights(one)
    assert found.keys() == stored.keys()
    assert "lm_head.weight" not in found
    assert all(np.array_equal(found[name], stored[name]) for name in stored)


def test_an_engine_is_used_between_start_and_close_only(model: Any, batch: Any) -> None:
    one = TorchTrainingEngine(TorchTrainingSettings())
    context = TrainingContext(name="trainer", model_path=model(), seed=0, threads=1, total_steps=1)
    with pytest.raises(ValueError, match="not started"):
        one.forward(batch([3]))
    one.start(context)
    with pytest.raises(ValueError, match="started already"):
        one.start(context)
    one.close()
    one.close()
    with pytest.raises(ValueError, match="not started, or closed"):
        one.forward(batch([3]))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_an_engine_error_with_a_fix(engine: Any) -> None:
    with pytest.raises(EngineError, match='set device = "cpu"'):
        engine(device="cuda")
