"""What separate stages compute is what the trainer would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.contract import Array, Batch, Ragged, TrainingContext
from headrace.contract.columns import (
    BEHAVIOUR_LOGPROBS,
    GROUP,
    LOSS_MASK,
    REFERENCE_LOGPROBS,
    REWARD,
    TOKENS,
    TRUNCATED,
    VERSION,
)
from headrace.flow.stages import stages_of
from headrace.registry import PluginSpec
from headrace.run.columns import flow_columns
from headrace.services.prepared import prepared
from headrace.services.scored import group_passes, scored
from headrace.services.stage_messages import StagePhase, StageSetup
from headrace.services.stage_work import Advantage, Reference
from headrace.testing.training import FakeTrainingEngine, FakeTrainingSettings
from headrace_algorithms.grpo import Grpo

SIZE = 4
SETUP = StageSetup(ledger="", threads=1, seed=0)
GRPO = PluginSpec(role="algorithm", use="grpo", settings={"kl_coefficient": 0.1})
BASELINE = PluginSpec(role="algorithm", use="supervised")
ENGINE = PluginSpec(role="training_engine", use="headrace.testing:FakeTrainingEngine")


def phase(stage: str, *, algorithm: PluginSpec = GRPO, model: str = "", lockstep: bool = False) -> StagePhase:
    columns = flow_columns(stages_of(Grpo.needs(Grpo.Settings(kl_coefficient=0.1))), apart=True, lockstep=lockstep)
    return StagePhase(
        partition="rl",
        reads=columns.consumers[stage],
        writes=columns.writes[stage],
        engine=ENGINE,
        algorithm=algorithm,
        model_path=model,
        temperature=0.7,
        lockstep=lockstep,
        tokens=64,
    )


def batch(groups: int, seed: int) -> Batch:
    random = np.random.default_rng(seed)
    rows = np.arange(groups * SIZE)
    tokens = Ragged.from_arrays([random.integers(0, 16, 1 + random.integers(1, 6)).astype(np.int32) for _ in rows])
    known = np.concatenate([np.arange(length) > 0 for length in tokens.lengths])
    return Batch(
        rows=rows,
        columns={
            TOKENS: tokens,
            LOSS_MASK: tokens.like(known),
            BEHAVIOUR_LOGPROBS: tokens.like(np.zeros(len(tokens.values), np.float32)),
            REWARD: random.choice(np.array([0, 0.5, 1, np.nan], np.float32), len(rows)),
            GROUP: rows // SIZE,
            VERSION: np.full(len(rows), 3),
            TRUNCATED: random.random(len(rows)) < 0.2,
        },
    )


def assert_same(one: Batch, other: Batch) -> None:
    assert one.columns.keys() == other.columns.keys()
    for name, column in one.columns.items():
        values, others = (c.values if isinstance(c, Ragged) else c for c in (column, other.columns[name]))
        np.testing.assert_array_equal(values, others, err_msg=name)
        assert values.dtype == others.dtype


@settings(max_examples=60, deadline=None)
@given(groups=st.integers(1, 6), seed=st.integers(0, 99), data=st.data())
def test_advantages_are_those_of_the_whole_batch_to_the_bit_however_groups_are_leased(
    groups: int, seed: int, data: st.DataObject
) -> None:
    """So that the same is trained with stages apart as without."""
    whole = batch(groups, seed)
    stage = Advantage(phase("advantage"), SETUP)
    columns, _ = prepared(Grpo(Grpo.Settings(kl_coefficient=0.1)), whole)
    expected = Batch(rows=whole.rows, columns={name: columns[name] for name in phase("advantage").writes})
    order = data.draw(st.permutations(range(groups)))
    cut = data.draw(st.integers(1, groups))
    parts = [whole.take(np.flatnonzero(np.isin(whole.dense(GROUP), chosen))) for chosen in (order[:cut], order[cut:])]
    found = [Batch(rows=part.rows, columns=dict(stage.compute(part).columns)) for part in parts if len(part)]
    together = Batch.concatenate(found)
    assert_same(together.take(np.argsort(together.rows)), expected)


def test_metrics_come_by_group() -> None:
    done = Advantage(phase("advantage"), SETUP).compute(batch(3, 1))
    assert sorted(done.metrics) == [0, 1, 2]
    assert all("reward/mean" in metrics for metrics in done.metrics.values())


def test_where_a_loss_reads_no_advantages_they_are_zeros() -> None:
    done = Advantage(phase("advantage", algorithm=BASELINE), SETUP).compute(batch(2, 1))
    advantages = done.columns["advantages"]
    assert isinstance(advantages, Ragged)
    assert advantages.values.dtype == np.float32
    assert not advantages.values.any()


def test_reference_log_probs_are_of_the_weights_the_phase_started_from(tmp_path: Path) -> None:
    model, rows = str(tmp_path / "model"), batch(2, 5)
    FakeTrainingEngine.create_model(model, settings={}, seed=1)
    stage = Reference(phase("reference", model=model), SETUP)
    engine = FakeTrainingEngine(FakeTrainingSettings())
    engine.start(TrainingContext(name="trainer", model_path=model, seed=0, threads=1, total_steps=10))
    expected = engine.forward(rows, temperature=0.7)["logprobs"].values
    found = stage.compute(rows).columns[REFERENCE_LOGPROBS]
    assert isinstance(found, Ragged)
    np.testing.assert_array_equal(found.values, expected)
    assert expected.any()
    stage.close()


class Passes(FakeTrainingEngine):
    """Remembers which rows shared a forward pass."""

    seen: list[list[int]]

    def forward(self, batch: Batch, **options: Any) -> Any:
        self.seen = [*getattr(self, "seen", []), batch.rows.tolist()]
        return super().forward(batch, **options)


def passes_of(rows: Batch, wanted: Array, tmp_path: Path) -> list[list[int]]:
    model = str(tmp_path / "model")
    FakeTrainingEngine.create_model(model, settings={}, seed=1)
    engine = Passes(FakeTrainingSettings())
    engine.start(TrainingContext(name="trainer", model_path=model, seed=0, threads=1, total_steps=10))
    scored(engine, rows, group_passes(rows, wanted, token_budget=64), weights="current", temperature=1.0)
    return engine.seen


def test_in_lockstep_a_group_shares_a_forward_pass_with_itself_alone(tmp_path: Path) -> None:
    rows = batch(3, 6)
    every = np.ones(len(rows), dtype=np.bool_)
    alone = [[4 * group + member for member in range(SIZE)] for group in range(3)]
    assert passes_of(rows, every, tmp_path / "all") == alone
    mixed = rows.take(np.random.default_rng(0).permutation(len(rows)))
    assert passes_of(mixed, every, tmp_path / "mixed") == alone
    some = np.isin(mixed.rows, [5, 11])  # one row of each of two groups has a gradient
    assert passes_of(mixed, some, tmp_path / "some") == alone[1:]


def test_in_lockstep_no_stage_takes_rows_ahead_of_their_group() -> None:
    columns = flow_columns(stages_of(Grpo.needs(Grpo.Settings(kl_coefficient=0.1))), apart=True, lockstep=True)
    assert columns.by_row == ()


@pytest.mark.parametrize("apart", [True, False])
def test_only_stages_apart_store_what_they_add(apart: bool) -> None:
    columns = flow_columns(stages_of(Grpo.needs(Grpo.Settings(kl_coefficient=0.1))), apart=apart, lockstep=False)
    assert sorted(columns.consumers) == (["advantage", "reference", "train"] if apart else ["train"])
    assert columns.by_row == (("reference",) if apart else ())
    assert columns.consumers["train"] == columns.all
    assert set(columns.all) - set(columns.first) == {c for added in columns.writes.values() for c in added}
