"""Cases A, C, D and K that a training engine must keep, on the embedded one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.contract import Batch, LossInputs, LossOutput, LossSpec, Ragged, StepResult, TrainingContext
from headrace.contract.columns import Array
from headrace.errors import ConfigError, RunError
from headrace_torch.trainer.schedule import Schedule
from headrace_torch.training import TorchTrainingEngine, TorchTrainingSettings

MODEL: dict[str, Any] = {
    "architecture": "llama",
    "alphabet": "abcdefghij",
    "hidden_size": 16,
    "layers": 2,
    "heads": 2,
    "intermediate_size": 24,
    "max_length": 32,
}
A01_LOSSES = ([1.0], [2.0, 2.0, 2.0], [3.0, 5.0], [1.0, 1.0, 1.0, 1.0])
A01_SPLITS = ([[0], [1], [2], [3]], [[0, 1], [2, 3]], [[0, 1, 2, 3]], [[3], [0, 2, 1]])
A01_EXPECTED = {
    "token_mean": 1.9,
    "sequence_mean_token_mean": 2.0,
    "sequence_mean_token_sum": 4.75,
    "constant": 0.59375,
    "prompt_mean": 2.214286,
}


def valued(inputs: LossInputs) -> LossOutput:
    """Per-token losses whose values are column ``value``; their gradients are ``value`` times the log-prob's."""
    value = inputs.columns["value"]
    return LossOutput(numerator=(inputs.weights * value * (1 + inputs.logprobs - inputs.logprobs.detach())).sum())


SPEC = LossSpec(function="losses_of_training_cases:valued", columns=("value",))


@pytest.fixture(autouse=True)
def _losses(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("losses_of_training_cases")
    module.valued = valued  # type: ignore[attr-defined]  # a module made at run time
    monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("model"))
    TorchTrainingEngine.create_model(path, settings=MODEL, seed=1)
    return path


@pytest.fixture
def start(model: str) -> Iterator[Callable[..., TorchTrainingEngine]]:
    engines: list[TorchTrainingEngine] = []

    def new(path: str = model, **settings: Any) -> TorchTrainingEngine:
        engine = TorchTrainingEngine(TorchTrainingSettings(**{"learning_rate": 1e-2, **settings}))
        engine.start(TrainingContext(name="trainer", model_path=path, seed=0, threads=1, total_steps=100))
        engines.append(engine)
        return engine

    yield new
    for engine in engines:
        engine.close()


def rows_of(values: Sequence[Sequence[float]], *, weights: Sequence[float] | None = None, seed: int = 0) -> Batch:
    """A prompt of 2 tokens and one trained token for each value; ``weights``: of each row's tokens."""
    generator = np.random.default_rng(seed)
    lengths = [2 + len(row) for row in values]
    tokens = Ragged.from_arrays([generator.integers(3, 13, n).astype(np.int32) for n in lengths], dtype=np.int32)
    mask = Ragged.from_arrays([np.arange(n) >= 2 for n in lengths], dtype=np.bool_)
    per_row = np.ones(len(values)) if weights is None else np.asarray(weights)
    return Batch(
        rows=np.arange(len(values)),
        columns={
            "tokens": tokens,
            "loss_mask": mask,
            "loss_weights": tokens.like(np.repeat(per_row, lengths).astype(np.float32)),
            "value": Ragged.from_arrays(
                [np.concatenate([[0.0, 0.0], row]).astype(np.float32) for row in values], dtype=np.float32
            ),
        },
    )


def train(engine: TorchTrainingEngine, parts: Sequence[Batch], *, denominator: float = 10.0) -> StepResult:
    step = engine.begin_step(SPEC)
    for part in parts:
        step.accumulate(part)
    return step.finish(denominator=denominator)


def gradient(engine: TorchTrainingEngine, parts: Sequence[Batch], *, denominator: float = 1.0) -> Array:
    """What the optimiser would be given, flat; the step is discarded."""
    step = engine.begin_step(SPEC)
    for part in parts:
        step.accumulate(part)
    gradients = engine._started._updater.parameters.gradients()
    flat = np.concatenate([g.numpy().astype(np.float64).ravel() for g in gradients]) / denominator
    step.discard()
    return flat


def state_of(engine: TorchTrainingEngine) -> dict[str, Array]:
    """Everything the next step reads."""
    updater = engine._started._updater
    tensors: dict[str, torch.Tensor] = dict(updater.parameters.masters)
    tensors |= updater.optimizer.state()
    state = {name: np.array(tensor.detach().numpy()) for name, tensor in tensors.items()}
    return state | {"steps": np.array(updater.steps), "random": torch.get_rng_state().numpy().copy()}


def differing(left: dict[str, Array], right: dict[str, Array]) -> list[str]:
    assert left.keys() == right.keys()
    return [name for name in left if not np.array_equal(left[name], right[name])]


def relative(found: Array, expected: Array) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def a01_weights(aggregation: str) -> tuple[list[float], float]:
    """Row weights and the denominator of the whole step."""
    lengths = [len(row) for row in A01_LOSSES]
    return {
        "token_mean": ([1.0] * 4, 10.0),
        "sequence_mean_token_mean": ([1 / n for n in lengths], 4.0),
        "sequence_mean_token_sum": ([1.0] * 4, 4.0),
        "constant": ([1.0] * 4, 8.0 * 4),
        "prompt_mean": ([1 / 3, 1 / 7, 1 / 3, 1 / 7], 2.0),
    }[aggregation]


@pytest.mark.parametrize("aggregation", A01_EXPECTED)
def test_A01_loss_and_gradient_do_not_depend_on_the_split(
    aggregation: str, start: Callable[..., TorchTrainingEngine]
) -> None:
    weights, denominator = a01_weights(aggregation)
    rows = rows_of(A01_LOSSES, weights=weights)
    gradients, results = [], []
    for split in A01_SPLITS:
        engine = start()
        parts = [rows.take(part) for part in split]
        gradients.append(gradient(engine, parts, denominator=denominator))
        results.append(train(engine, parts, denominator=denominator))
    assert max(relative(found, gradients[0]) for found in gradients[1:]) < 1e-6
    for result in results:
        assert result.loss == pytest.approx(A01_EXPECTED[aggregation], abs=1e-6)
        assert result.gradient_norm == pytest.approx(np.linalg.norm(gradients[0]), rel=1e-6)


def test_A06_a_part_counts_by_its_tokens_and_an_empty_part_by_nothing(
    start: Callable[..., TorchTrainingEngine],
) -> None:
    """Parts of 3, 1 and 0 tokens: raising the first part's mean loss by 1 raises the loss by 0.75."""
    engine = start()
    empty = rows_of([[], []])
    second = rows_of([[5.0]], seed=1)
    low = train(engine, [rows_of([[1.0, 2.0, 3.0]]), empty, second], denominator=4.0)
    high = train(engine, [rows_of([[2.0, 3.0, 4.0]]), second, empty], denominator=4.0)
    assert high.loss - low.loss == pytest.approx(0.75, abs=1e-6)
    assert low.applied
    assert np.isfinite(low.gradient_norm)


@pytest.mark.parametrize("sequences", [9, 2])
def test_A07_uneven_and_empty_shares_give_the_gradient_of_one_pass(
    sequences: int, start: Callable[..., TorchTrainingEngine]
) -> None:
    engine, rows = start(), rows_of([[float(i), 1.0] for i in range(sequences)])
    shares = [rows.take(part) for part in np.array_split(np.arange(sequences), 4)]
    assert (min(len(share) for share in shares) == 0) == (sequences == 2)
    assert relative(gradient(engine, shares), gradient(engine, [rows])) < 1e-6


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e38])
def test_C07_a_step_that_is_not_finite_changes_nothing(
    bad: float, optimizer: str, start: Callable[..., TorchTrainingEngine]
) -> None:
    """Not even in the middle of good micro-batches, nor (1e38) with a finite loss and an infinite gradient."""
    settings = {"optimizer": optimizer, "schedule": "linear", "warmup_steps": 3}
    engine, untouched = start(**settings), start(**settings)
    good = rows_of([[1.0, 2.0], [3.0]])
    for each in (engine, untouched):
        assert train(each, [good]).applied
    before = state_of(engine)
    result = train(engine, [good, rows_of([[bad, -bad]], seed=2), good])
    assert not result.applied
    assert result.learning_rate == pytest.approx(2e-2 / 3)
    assert differing(state_of(engine), before) == []
    assert train(engine, [good]) == train(untouched, [good])
    assert differing(state_of(engine), state_of(untouched)) == []


def fixed_logits(model: str, directory: Path, logits: Array) -> str:
    """A model whose logits after token i are ``logits[i]``: one-hot embeddings, layers that add nothing."""
    size = len(logits)
    TorchTrainingEngine.create_model(
        str(directory), settings={**MODEL, "tie_embeddings": False, "vocabulary_size": 16}, seed=0
    )
    file = str(directory / "model.safetensors")
    tensors = load_file(file)
    for name, tensor in tensors.items():
        tensors[name] = torch.ones_like(tensor) if "norm" in name else torch.zeros_like(tensor)
    # The final norm scales a one-hot vector by the root of its width.
    tensors["model.embed_tokens.weight"] = 1e3 * torch.eye(16)
    head = torch.full((16, 16), -1e4)
    head[:size, :size] = torch.from_numpy(logits.T.astype(np.float32))
    tensors["lm_head.weight"] = head / 4.0
    save_file(tensors, file, metadata={"format": "pt"})
    return str(directory)


def test_D02_logprobs_are_those_of_the_tempered_distribution(
    model: str, start: Callable[..., TorchTrainingEngine], tmp_path: Path
) -> None:
    engine = start(fixed_logits(model, tmp_path / "fixed", np.array([[2.0, 0.0], [2.0, 0.0]])))
    row = Batch(
        rows=np.arange(1),
        columns={
            "tokens": Ragged.from_arrays([np.zeros(2, dtype=np.int32)]),
            "loss_mask": Ragged.from_arrays([np.array([False, True])]),
            "loss_weights": Ragged.from_arrays([np.ones(2, dtype=np.float32)]),
            "value": Ragged.from_arrays([np.ones(2, dtype=np.float32)]),
        },
    )
    assert engine.forward(row, temperature=0.5)["logprobs"].values[1] == pytest.approx(-0.018150, abs=1e-6)
    assert engine.forward(row)["logprobs"].values[1] == pytest.approx(-0.126928, abs=1e-6)
    seen: list[float] = []

    def watching(inputs: LossInputs) -> LossOutput:
        seen.extend(inputs.logprobs.tolist())
        return LossOutput(numerator=inputs.logprobs.sum())

    sys.modules["losses_of_training_cases"].watching = watching  # type: ignore[attr-defined]  # as above
    step = engine.begin_step(LossSpec(function="losses_of_training_cases:watching", temperature=0.5))
    step.accumulate(row)
    step.discard()
    assert seen == pytest.approx([-0.018150], abs=1e-6)
    with pytest.raises(ConfigError, match="above 0"):
        engine.forward(row, temperature=0.0)


def test_D03_a_logprob_is_of_its_own_token_and_position_0_has_none(
    model: str, start: Callable[..., TorchTrainingEngine], tmp_path: Path
) -> None:
    chances = np.array([[0.05, 0.9, 0.05], [0.1, 0.1, 0.8], [0.7, 0.2, 0.1]])
    engine = start(fixed_logits(model, tmp_path / "bigram", np.log(chances)))
    row = Batch(
        rows=np.arange(1),
        columns={
            "tokens": Ragged.from_arrays([np.array([0, 1, 2, 0], dtype=np.int32)]),
            "loss_mask": Ragged.from_arrays([np.array([False, True, True, True])]),
        },
    )
    expected = [0.0, -0.105361, -0.223144, -0.356675]
    np.testing.assert_allclose(engine.forward(row)["logprobs"].values, expected, atol=1e-6)


def test_D04_packed_rows_do_not_see_each_other(start: Callable[..., TorchTrainingEngine]) -> None:
    engine = start()
    generator = np.random.default_rng(4)
    tokens = [generator.integers(3, 13, n).astype(np.int32) for n in (3, 5, 2)]

    def logprobs(rows: Sequence[Array]) -> list[Array]:
        batch = Batch(
            rows=np.arange(len(rows)),
            columns={
                "tokens": Ragged.from_arrays(rows),
                "loss_mask": Ragged.from_arrays([np.arange(len(row)) > 0 for row in rows]),
            },
        )
        return list(engine.forward(batch)["logprobs"])

    packed = logprobs(tokens)
    for row, alone in zip(packed, (logprobs([row])[0] for row in tokens), strict=True):
        np.testing.assert_allclose(row, alone, atol=1e-5)
    for edited in range(5):
        other = tokens[1].copy()
        other[edited] = 3 + (other[edited] - 2) % 10
        changed = logprobs([tokens[0], other, tokens[2]])
        assert not np.array_equal(changed[1], packed[1])
        assert np.array_equal(changed[0], packed[0])
        assert np.array_equal(changed[2], packed[2])


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_K06_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(
    optimizer: str, start: Callable[..., TorchTrainingEngine], tmp_path: Path
) -> None:
    settings = {"optimizer": optimizer, "weight_decay": 0.1, "schedule": "cosine", "warmup_steps": 2}
    batches = [rows_of([[1.0, 2.0], [3.0]], seed=seed) for seed in range(6)]
    whole = start(**settings)
    results = [train(whole, [rows]) for rows in batches]
    killed = start(**settings)
    for rows in batches[:3]:
        train(killed, [rows])
    killed.save(str(tmp_path / "save"), kind="resume")
    killed.close()
    resumed = start(**settings)
    resumed.load(str(tmp_path / "save"))
    assert [train(resumed, [rows]) for rows in batches[3:]] == results[3:]
    assert differing(state_of(resumed), state_of(whole)) == []
    (tmp_path / "save" / "optimizer.safetensors").unlink()
    with pytest.raises(RunError, match=r"optimizer\.safetensors cannot be read"):
        resumed.load(str(tmp_path / "save"))


def test_K07_the_learning_rate_is_a_function_of_the_steps_taken(
    start: Callable[..., TorchTrainingEngine], tmp_path: Path
) -> None:
    cosine = Schedule(name="cosine", warmup_steps=10, total_steps=100, final_share=0.0)
    assert 1e-3 * cosine.share(0) == pytest.approx(1e-4)
    assert 1e-3 * cosine.share(37) == pytest.approx(7.938926e-4, abs=1e-10)
    assert 1e-3 * cosine.share(38) == pytest.approx(7.795965e-4, abs=1e-10)
    settings = {"learning_rate": 1e-3, "schedule": "cosine", "warmup_steps": 10}
    rows = rows_of([[1.0, 2.0]])
    first = start(**settings)
    rates = [train(first, [rows]).learning_rate for _ in range(12)]
    first.save(str(tmp_path / "save"), kind="resume")
    resumed = start(**settings)
    resumed.load(str(tmp_path / "save"))
    rates.append(train(resumed, [rows]).learning_rate)
    assert rates == pytest.approx([1e-3 * cosine.share(step) for step in range(13)])
