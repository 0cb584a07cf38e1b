"""The example jobs' environments start as they are written, with the vocabulary of the model they ask for."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from headrace.config import check_job, load_job
from headrace.contract import Demonstrations, Environment, EnvironmentContext
from headrace.registry import build
from headrace_environments.rewards import load_reward
from headrace_torch.scratch import create_model

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.parametrize("name", ["sort_symbols", "rewards", "jsonl", "reasoning_gym"])
def test_an_examples_environment_fits_its_model(name: str, tmp_path: Path) -> None:
    job = load_job(EXAMPLES / name / "job.toml")
    assert job.model.scratch is not None
    create_model(str(tmp_path / "model"), settings=job.model.scratch, seed=0)
    environment = build(job.environment.spec)
    assert isinstance(environment, Environment)
    assert isinstance(environment, Demonstrations)
    environment.start(EnvironmentContext(model_path=str(tmp_path / "model"), seed=0, directory=job.directory))
    for index in range(50):
        task = environment.task(index, split="train")
        shown = environment.demonstration(task)
        assert int(shown.loss_mask.sum()) <= job.rollout.max_new_tokens
        assert len(shown.tokens) - int(shown.loss_mask.sum()) + job.rollout.max_new_tokens <= 128
        if name != "rewards":
            assert environment.score(task, shown).reward == 1


def test_a_pretrained_model_that_is_not_there_leads_to_what_says_how_to_get_it(tmp_path: Path) -> None:
    job = load_job(EXAMPLES / "smollm2" / "job.toml", [f"model.path={tmp_path / 'gone'}"])
    (missing,) = (str(finding) for finding in check_job(job) if "is not a folder" in str(finding))
    told = EXAMPLES / "smollm2" / "README.md"
    assert f"; {told} may say how to get this one" in missing
    assert "python examples/smollm2/convert.py" in told.read_text()


def test_the_ten_line_reward_is_that_and_pays_for_falling_symbols() -> None:
    lines = (EXAMPLES / "rewards" / "ten_lines.py").read_text().splitlines()
    assert sum(bool(line.strip()) for line in lines) <= 10
    reward = load_reward("./ten_lines.py:reward", directory=str(EXAMPLES / "rewards"), origin="")
    values = {"prompt": "q7bk=", "record": {}, "finish_reason": "stop"}
    paid = {answer: reward({**values, "answer": answer}).reward for answer in ("qkb7", "zyxw", "7bkq", "qkz", "", "q<")}
    assert paid == {"qkb7": 1, "zyxw": 1, "7bkq": 0, "qkz": pytest.approx(1 / 3), "": 0, "q<": 0}
    assert not any(map(math.isnan, paid.values()))
