"""A job that Megatron cannot do is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.contract import TrainingContext
from headrace.errors import EngineError, HeadraceError
from headrace_megatron.training import MegatronTrainingEngine


def test_an_interpreter_without_megatron_is_told_how_to_have_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(HeadraceError, match="does not have") as caught:
        MegatronTrainingEngine.preflight(MegatronTrainingEngine.Settings(), directory="", origin=str)
    assert "headrace env create megatron" in caught.value.fix


def test_a_critic_is_refused_and_not_approximated(tmp_path: Path) -> None:
    engine = MegatronTrainingEngine(MegatronTrainingEngine.Settings())
    context = TrainingContext(name="trainer", model_path=str(tmp_path), seed=0, threads=1, total_steps=1, values=True)
    with pytest.raises(EngineError, match="keeps no critic"):
        engine.start(context)
