"""Weights on their way to an engine in other processes: complete and intact, or not handed over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from headrace.contract import Array, WeightManifest
from headrace.errors import EngineError
from headrace.testing.suites.serving import manifest_of
from headrace.testing.tensors import write_tensors
from headrace_serving.checkpoint import Checkpoint, read_checkpoint
from headrace_serving.staging import StagedWeights

CONFIG = '{"vocab_size": 7, "max_position_embeddings": 64, "tie_word_embeddings": %s}'


def tensors(**changes: Array) -> dict[str, Array]:
    generator = np.random.default_rng(0)
    named = {
        "model.embed_tokens.weight": generator.standard_normal((7, 4)).astype(np.float32),
        "model.norm.weight": np.ones(4, dtype=ml_dtypes.bfloat16),
    }
    return {**named, **{name.replace("__", "."): tensor for name, tensor in changes.items()}}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    (tmp_path / "config.json").write_text(CONFIG % "true")
    write_tensors(tmp_path / "model.safetensors", tensors())
    return read_checkpoint(str(tmp_path))


@pytest.fixture
def staged(checkpoint: Checkpoint) -> Iterator[StagedWeights]:
    opened = StagedWeights(manifest_of(tensors(), 3), checkpoint)
    yield opened
    opened.close()


def put(staged: StagedWeights, arrived: Mapping[str, Array]) -> None:
    for name, tensor in arrived.items():
        staged.put(name, tensor)


def read(staged: StagedWeights) -> dict[str, Array]:
    """As an engine's processes do: by path, dtype, shape and place."""
    info = staged.update_info()
    data = Path(info["path"]).read_bytes()
    assert len(data) == info["nbytes"]
    found = {}
    for name, dtype, shape, start in info["tensors"]:
        kind = np.dtype(dtype)
        count = int(np.prod(shape)) * kind.itemsize
        found[name] = np.frombuffer(data[start : start + count], kind).reshape(shape)
    return found


def test_a_checkpoint_tells_names_and_shapes_of_its_tensors(checkpoint: Checkpoint) -> None:
    assert checkpoint.shapes == {"model.embed_tokens.weight": (7, 4), "model.norm.weight": (4,)}
    assert (checkpoint.vocabulary, checkpoint.context) == (7, 64)


def test_a_folder_that_is_no_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="no model in Hugging Face's format"):
        read_checkpoint(str(tmp_path))
    (tmp_path / "config.json").write_text(CONFIG % "false")
    with pytest.raises(EngineError, match=r"no \*.safetensors"):
        read_checkpoint(str(tmp_path))


def test_what_was_put_lies_where_another_process_can_read_it(staged: StagedWeights) -> None:
    put(staged, tensors())
    assert staged.problems() == []
    for name, tensor in read(staged).items():
        assert tensor.dtype == tensors()[name].dtype
        np.testing.assert_array_equal(tensor, tensors()[name])


def test_a_tensor_that_is_not_contiguous_arrives_in_c_order(checkpoint: Checkpoint) -> None:
    turned = np.asfortranarray(tensors()["model.embed_tokens.weight"])
    staged = StagedWeights(manifest_of(tensors(), 1), checkpoint)
    put(staged, tensors(model__embed_tokens__weight=turned))
    assert staged.problems() == []
    staged.close()


def test_a_tensor_that_never_arrived_is_named(staged: StagedWeights) -> None:
    staged.put("model.norm.weight", tensors()["model.norm.weight"])
    assert staged.problems() == ["never arrived: model.embed_tokens.weight"]


def test_a_damaged_tensor_is_named_until_it_arrives_right(staged: StagedWeights) -> None:
    put(staged, tensors(model__embed_tokens__weight=np.zeros((7, 4), np.float32)))
    assert staged.problems() == ["the checksum is wrong of model.embed_tokens.weight"]
    put(staged, tensors())
    assert staged.problems() == []


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (np.zeros((6, 4), np.float32), r"shape \(6, 4\), manifest \(7, 4\), model \(7, 4\)"),
        (np.zeros((7, 4), np.float64), "dtype float64, the manifest says float32"),
    ],
)
def test_a_tensor_of_another_kind_is_named(staged: StagedWeights, tensor: Array, said: str) -> None:
    put(staged, tensors(model__embed_tokens__weight=tensor))
    (problem,) = staged.problems()
    assert problem.startswith("model.embed_tokens.weight: ")
    with pytest.raises(ValueError, match=said):
        raise ValueError(problem)


def problems_of(manifest: WeightManifest, arrived: Mapping[str, Array], checkpoint: Checkpoint) -> list[str]:
    staged = StagedWeights(manifest, checkpoint)
    put(staged, arrived)
    found = staged.problems()
    staged.close()
    return found


def test_a_renamed_tensor_is_named_on_both_sides(checkpoint: Checkpoint) -> None:
    renamed = {name.replace("norm", "nrm"): tensor for name, tensor in tensors().items()}
    found = problems_of(manifest_of(renamed, 1), renamed, checkpoint)
    assert found == ["the model has no model.nrm.weight", "the manifest lacks model.norm.weight"]


def test_a_manifest_of_another_shape_than_the_model_is_refused(checkpoint: Checkpoint) -> None:
    wider = tensors(model__norm__weight=np.ones(5, dtype=ml_dtypes.bfloat16))
    assert problems_of(manifest_of(wider, 1), wider, checkpoint) == [
        "model.norm.weight: shape (5,), manifest (5,), model (4,)"
    ]


def test_another_dtype_than_the_model_files_is_no_problem(checkpoint: Checkpoint) -> None:
    wider = tensors(model__norm__weight=np.ones(4, dtype=np.float32))
    assert problems_of(manifest_of(wider, 1), wider, checkpoint) == []


def test_a_tied_head_may_come_or_stay_away(checkpoint: Checkpoint, tmp_path: Path) -> None:
    with_head = {**tensors(), "lm_head.weight": tensors()["model.embed_tokens.weight"]}
    assert problems_of(manifest_of(with_head, 1), with_head, checkpoint) == []
    write_tensors(tmp_path / "model.safetensors", with_head)
    assert read_checkpoint(str(tmp_path)).shapes == checkpoint.shapes


def test_an_untied_head_must_come(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(CONFIG % "false")
    write_tensors(tmp_path / "model.safetensors", {**tensors(), "lm_head.weight": np.zeros((7, 4), np.float32)})
    found = problems_of(manifest_of(tensors(), 1), tensors(), read_checkpoint(str(tmp_path)))
    assert found == ["the manifest lacks lm_head.weight"]


def test_closing_twice_is_closing_once(checkpoint: Checkpoint) -> None:
    staged = StagedWeights(manifest_of(tensors(), 1), checkpoint)
    staged.close()
    staged.close()


def test_what_was_put_is_a_weight_file(checkpoint: Checkpoint, tmp_path: Path) -> None:
    narrow_first = dict(reversed(tensors().items()))
    staged = StagedWeights(manifest_of(narrow_first, 1), checkpoint)
    put(staged, narrow_first)
    whole = {name: tensor for name, tensor in narrow_first.items() if tensor.dtype == np.float32}
    (tmp_path / "staged.safetensors").symlink_to(staged.path)
    with safe_open(tmp_path / "staged.safetensors", framework="numpy") as opened:
        assert set(opened.keys()) == set(narrow_first)
        for name, tensor in whole.items():
            np.testing.assert_array_equal(opened.get_tensor(name), tensor)
    staged.close()
