"""What Megatron's ranks are given, and what is refused, said without Megatron."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import EngineError
from headrace_megatron.architecture import Architecture, require_layout
from headrace_megatron.names import places
from headrace_megatron.settings import MegatronTrainingSettings
from headrace_torch.training import TorchTrainingEngine
from support.fsdp import TINY


def write_config(path: Path, **changes: Any) -> str:
    """Of a model that is there only by its configuration."""
    TorchTrainingEngine.create_model(str(path), settings=TINY, seed=7)
    values = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**values, **changes}))
    return str(path)


MIXTURE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}


def test_ranks_that_share_matrices_or_layers_get_the_same_rows() -> None:
    settings = MegatronTrainingSettings(tensor_parallel=2, data_parallel=2, pipeline_parallel=2)
    assert settings.ranks == 8
    assert settings.shares == (0, 0, 1, 1, 0, 0, 1, 1)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"optimizer": "muon"}, 'optimizer must be "adamw"'),
        ({"data_parallel": 0}, "data_parallel must be at least 1"),
        ({"data_parallel": 2, "expert_parallel": 3}, "3 does not divide 2"),
        ({"data_parallel": 2, "expert_parallel": 2, "tensor_parallel": 2}, "tensor_parallel = 1"),
        ({"rank_deadline": 0.0}, "rank_deadline must be above 0"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        MegatronTrainingSettings(**settings)


@pytest.mark.parametrize(
    ("layout", "changes", "words"),
    [
        ({"tensor_parallel": 4}, {}, "2 key-value heads cannot be shared equally by tensor_parallel = 4"),
        ({"pipeline_parallel": 3}, {}, "2 layers cannot be shared equally by pipeline_parallel = 3"),
        ({"data_parallel": 2, "expert_parallel": 2}, {}, "no experts to share"),
        ({"data_parallel": 3, "expert_parallel": 3}, MIXTURE, "4 experts cannot be shared equally"),
        ({"tensor_parallel": 2}, MIXTURE, "tensor_parallel = 1"),
    ],
    ids=str,
)
def test_a_layout_that_does_not_fit_the_model_is_refused(
    layout: dict[str, int], changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    architecture = Architecture.from_directory(write_config(tmp_path / "model", **changes))
    with pytest.raises(EngineError, match=words):
        require_layout(architecture, MegatronTrainingSettings(**layout), origin="trainer")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention_bias": True}, "biases other than"),
        ({**MIXTURE, "norm_topk_prob": False}, "norm_topk_prob = false"),
        ({**MIXTURE, "mlp_only_layers": [0]}, "some of whose layers have no experts"),
        ({"model_type": "gemma"}, "model_type 'gemma'"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 2.0, "high_freq_factor": 4.0,
                              "original_max_position_embeddings": 8192}}, "scaling of frequencies"),
    ],
    ids=str,
)  # fmt: skip
def test_a_model_that_megatron_would_compute_otherwise_is_refused(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(EngineError, match=words):
        Architecture.from_directory(write_config(tmp_path / "model", **changes))


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, MIXTURE], ids=["untied", "tied", "mixture"])
def test_every_tensor_of_a_model_has_one_place(changes: dict[str, Any], tmp_path: Path) -> None:
    architecture = Architecture.from_directory(write_config(tmp_path / "model", **changes))
    found = places(architecture, MegatronTrainingSettings(pipeline_parallel=2, data_parallel=2))
    assert found.keys() == architecture.shapes.keys()
    assert {place.stage: place.first for place in found.values()} == {0: 0, 1: 2}
    experts = [name for name in found if ".experts." in name]
    assert len(experts) == (2 * 4 * 3 if changes is MIXTURE else 0)
