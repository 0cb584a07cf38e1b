"""One rank and two compute what the torch engine computes, and transformers agrees."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.contract import Array, StepResult
from headrace.contract.columns import TOKENS
from headrace.testing.suites.trainees import Trainee
from headrace.testing.tensors import read_tensors
from headrace.wire import manifest_digest, tensor_info
from headrace_torch.trainer.core import Trainer
from support.fsdp import gradient, started, write_model


@dataclass
class Facts:
    """What is known of an engine."""

    logprobs: Array
    entropy: Array
    digest: str
    exported: str
    result: StepResult
    slope: Array
    trained: dict[str, Array]


def facts_of(trainee: Trainee, folder: Path) -> Facts:
    batch = trainee.batch()
    found = trainee.engine.forward(batch, outputs=("logprobs", "entropy"), temperature=0.7)
    manifest = manifest_digest([tensor_info(*each) for each in trainee.engine.weight_source().tensors()])
    trainee.engine.save(str(folder / "export"), kind="export")
    result = trainee.train(batch.take([0, 1, 2]), batch.take([3, 4, 5]))
    weights = trainee.weights()
    trainee.engine.save(str(folder / "save"), kind="resume")
    started_trainer = trainee.engine._started  # type: ignore[attr-defined]
    if isinstance(started_trainer, Trainer):
        state = started_trainer._updater.optimizer.state()
        slope = np.concatenate([10 * state[f"{n}/exp_avg"].numpy().ravel().astype(np.float64) for n in weights])
    else:
        slope = gradient(folder / "save", weights)
    exported = (folder / "export" / "model.safetensors").read_bytes()
    return Facts(
        logprobs=found["logprobs"].values,
        entropy=found["entropy"].values,
        digest=manifest,
        exported=hashlib.sha256(exported).hexdigest(),
        result=result,
        slope=slope,
        trained=weights,
    )


@pytest.fixture(scope="module")
def facts(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[int | None, Facts]:
    """By number of ranks; None: the torch engine's."""
    found = {}
    for ranks in (None, 1, 2):
        with started(tiny_model, ranks=ranks) as trainee:
            found[ranks] = facts_of(trainee, tmp_path_factory.mktemp("facts"))
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_log_probs_and_entropies_are_those_of_the_torch_engine(facts: dict[Any, Facts], ranks: int) -> None:
    np.testing.assert_allclose(facts[ranks].logprobs, facts[None].logprobs, atol=1e-5)
    np.testing.assert_allclose(facts[ranks].entropy, facts[None].entropy, atol=1e-5)


def test_log_probs_are_those_of_transformers(facts: dict[Any, Facts], tiny_model: str) -> None:
    from transformers import AutoModelForCausalLM

    peer = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    expected = []
    for row in Trainee(None, tiny_model).batch().ragged(TOKENS):  # type: ignore[arg-type]
        ids = torch.from_numpy(row.astype(np.int64))
        with torch.no_grad():
            table = (peer(ids[None]).logits[0, :-1] / 0.7).log_softmax(-1)
        expected += [0.0, *table.gather(1, ids[1:, None]).squeeze(1).tolist()]
    np.testing.assert_allclose(facts[2].logprobs, expected, atol=1e-4)


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_on_one_rank_and_two_are_those_of_the_torch_engine(facts: dict[Any, Facts], ranks: int) -> None:
    expected = facts[None].slope
    assert np.linalg.norm(facts[ranks].slope - expected) < 1e-5 * np.linalg.norm(expected)
    assert facts[ranks].result.loss == pytest.approx(facts[None].result.loss, rel=1e-6)
    assert facts[ranks].result.gradient_norm == pytest.approx(facts[None].result.gradient_norm, rel=1e-5)
    assert facts[ranks].result.metrics.keys() == facts[None].result.metrics.keys()
    for name, array in facts[None].trained.items():
        np.testing.assert_allclose(facts[ranks].trained[name], array, atol=1e-4)


def test_weights_before_any_step_have_one_digest_whatever_the_ranks(facts: dict[Any, Facts]) -> None:
    assert facts[1].digest == facts[2].digest == facts[None].digest
    assert facts[1].exported == facts[2].exported


def test_an_export_is_read_as_the_model_it_came_from(tiny_model: str, tmp_path: Path) -> None:
    with started(tiny_model, ranks=1) as trainee:
        trainee.engine.save(str(tmp_path / "export"), kind="export")
    theirs, ours = read_tensors(tiny_model), read_tensors(tmp_path / "export")
    assert list(map(np.array_equal, map(ours.get, theirs), theirs.values())) == [True] * len(ours)


KINDS: list[dict[str, Any]] = [
    {"architecture": "llama", "tie_embeddings": True},
    {"architecture": "qwen2", "kv_heads": 4},
    {"architecture": "qwen3", "tie_embeddings": True},
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("settings", [{}, {"dtype": "bfloat16"}, {"activation_checkpointing": True}], ids=str)
def test_every_kind_of_model_is_trained_as_by_the_torch_engine(
    kind: dict[str, Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    path = write_model(tmp_path / "model", **kind)
    found = []
    for ranks in (None, 1):
        own = {k: v for k, v in settings.items() if ranks or k != "activation_checkpointing"}
        with started(path, ranks=ranks, **own) as trainee:
            before = trainee.engine.forward(trainee.batch())["logprobs"].values
            result = trainee.train(trainee.batch().take([0, 3]), trainee.batch().take([1, 2, 4, 5]))
            found.append((before, result.loss, result.gradient_norm))
    tolerance = 1e-5 if settings.get("dtype") is None else 2e-2
    np.testing.assert_allclose(found[1][0], found[0][0], atol=tolerance)
    assert found[1][1:] == pytest.approx(found[0][1:], rel=tolerance)
