"""However its ranks are laid out, Megatron computes what the torch engine computes, and transformers agrees.

Run by ``make test-engines``, in Megatron's own environment.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.contract import Array, StepResult
from headrace.testing.tensors import read_tensors
from support.fsdp import write_model
from support.megatron import LAYOUTS, ONE, peer_logprobs, slope, started, write_mixture

# Warnings of Megatron and what it imports are not ours.
pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]

TEMPERATURE = 0.7


@dataclass
class Facts:
    """What is known of an engine."""

    logprobs: Array
    entropy: Array
    published: dict[str, Array]
    exported: dict[str, Array]
    result: StepResult
    slope: Array
    applied: StepResult


def facts_of(path: str, layout: dict[str, Any] | None, folder: Path, **settings: Any) -> Facts:
    with started(path, layout, **settings) as trainee:
        batch = trainee.batch()
        found = trainee.engine.forward(batch, outputs=("logprobs", "entropy"), temperature=TEMPERATURE)
        before = trainee.weights()
        trainee.engine.save(str(folder), kind="export")
        result = trainee.train(batch.take([0, 1, 2]), batch.take([3, 4, 5]))
        after = trainee.weights()
        return Facts(
            logprobs=found["logprobs"].values,
            entropy=found["entropy"].values,
            published=before,
            exported=read_tensors(folder),
            result=result,
            slope=slope(before, after),
            applied=trainee.train(batch.take([])),
        )


@pytest.fixture(scope="module")
def plain(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Facts:
    """The torch engine's."""
    return facts_of(tiny_model, None, tmp_path_factory.mktemp("facts") / "export")


@pytest.fixture(scope="module", params=LAYOUTS.values(), ids=list(LAYOUTS))
def facts(request: pytest.FixtureRequest, tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Facts:
    return facts_of(tiny_model, request.param, tmp_path_factory.mktemp("facts") / "export")


def same_bits(ours: dict[str, Array], theirs: dict[str, Array]) -> bool:
    return ours.keys() == theirs.keys() and all(ours[n].tobytes() == theirs[n].tobytes() for n in theirs)


def test_log_probs_and_entropies_are_those_of_the_torch_engine(facts: Facts, plain: Facts) -> None:
    np.testing.assert_allclose(facts.logprobs, plain.logprobs, atol=1e-5)
    np.testing.assert_allclose(facts.entropy, plain.entropy, atol=1e-5)


def test_weights_go_in_and_out_bit_for_bit(facts: Facts, tiny_model: str) -> None:
    stored = read_tensors(tiny_model)
    assert same_bits(facts.published, stored)
    assert same_bits(facts.exported, stored)


def test_gradients_are_those_of_the_torch_engine(facts: Facts, plain: Facts) -> None:
    assert np.linalg.norm(facts.slope - plain.slope) < 1e-5 * np.linalg.norm(plain.slope)
    assert facts.result.loss == pytest.approx(plain.result.loss, rel=1e-6)
    assert facts.result.gradient_norm == pytest.approx(plain.result.gradient_norm, rel=1e-5)
    assert facts.result.metrics["loss/tokens"].total == plain.result.metrics["loss/tokens"].total
    assert facts.applied.applied


KINDS: dict[str, dict[str, Any]] = {
    "llama": {"architecture": "llama", "tie_embeddings": True},
    "qwen2": {"architecture": "qwen2", "kv_heads": 4},
    "qwen3": {"architecture": "qwen3", "tie_embeddings": True},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["one", "tp2", "pp2"])
def test_every_kind_of_model_is_computed_as_by_transformers_and_trained_as_by_the_torch_engine(
    kind: str, layout: str, tmp_path: Path
) -> None:
    path = write_model(tmp_path / "model", **KINDS[kind])
    expected = facts_of(path, None, tmp_path / "plain")
    found = facts_of(path, LAYOUTS[layout], tmp_path / "export")
    np.testing.assert_allclose(found.logprobs, peer_logprobs(path, TEMPERATURE), atol=1e-4)
    assert same_bits(found.exported, read_tensors(path))
    assert np.linalg.norm(found.slope - expected.slope) < 1e-5 * np.linalg.norm(expected.slope)


def test_a_mixture_of_experts_is_computed_as_by_transformers_on_one_rank_and_two(tmp_path: Path) -> None:
    path = write_mixture(tmp_path / "model")
    expected = peer_logprobs(path, TEMPERATURE)
    stored, found = read_tensors(path), []
    for layout in (ONE, {"data_parallel": 2}, {"data_parallel": 2, "expert_parallel": 2}):
        facts = facts_of(path, layout, tmp_path / f"export-{len(found)}")
        np.testing.assert_allclose(facts.logprobs, expected, atol=1e-4)
        assert same_bits(facts.exported, stored)
        found.append(facts.slope)
    for other in found[1:]:
        assert np.linalg.norm(other - found[0]) < 1e-5 * np.linalg.norm(found[0])


@pytest.mark.parametrize("layout", ["one", "tp2", "dp2"])
def test_bfloat16_is_near_float32_and_published_as_it_is_computed(layout: str, tiny_model: str, tmp_path: Path) -> None:
    wide = facts_of(tiny_model, ONE, tmp_path / "wide")
    narrow = facts_of(tiny_model, LAYOUTS[layout], tmp_path / "narrow", dtype="bfloat16")
    assert np.abs(narrow.logprobs - wide.logprobs).mean() < 0.05
    assert {str(array.dtype) for array in narrow.published.values()} == {"bfloat16"}
    stored = {n: torch.from_numpy(a).bfloat16().float().numpy() for n, a in read_tensors(tiny_model).items()}
    assert same_bits({n: a.astype(np.float32) for n, a in narrow.published.items()}, stored)
    assert narrow.result.gradient_norm == pytest.approx(wide.result.gradient_norm, rel=0.05)
