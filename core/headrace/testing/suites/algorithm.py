"""The rules of the ``algorithm`` role.

class TestMyAlgorithm(AlgorithmContract):
    @pytest.fixture
    def plugin(self) -> Algorithm:
        return MyAlgorithm(MyAlgorithm.Settings())

    @pytest.fixture
    def tensor(self) -> Callable[[Array], Any]:
        return torch.from_numpy  # where the loss is written for torch
"""

from __future__ import annotations

import math
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import numpy as np
import pytest

from headrace.contract import Algorithm, Array, Batch, Column, LossInputs, LossOutput, Prepared, Ragged, Reduction
from headrace.contract.columns import (
    ADVANTAGES,
    BEHAVIOUR_LOGPROBS,
    DENOMINATOR,
    GREEDY_REWARD,
    GROUP,
    LOSS_MASK,
    LOSS_WEIGHTS,
    PROXIMAL_LOGPROBS,
    REFERENCE_LOGPROBS,
    REWARD,
    TOKENS,
    TRUNCATED,
    TURN_REWARDS,
    VALUES,
    VERSION,
)
from headrace.testing.pertoken import PerToken
from headrace.testing.suites.plugin import PluginContract
from headrace.testing.suites.rules import check, override, rule

TEMPERATURE = 0.8
STORED = (TOKENS, LOSS_MASK, BEHAVIOUR_LOGPROBS, REWARD, GROUP, VERSION, TRUNCATED)
"""The columns of every row."""
UNEQUAL, OTHER, EQUAL = (1.0, 0.0, 0.0, 0.5), (0.0, 0.25, 1.0, 1.0), (1.0, 1.0, 1.0, 1.0)
"""Rewards of groups of four."""
SPLITS = ([[0, 1, 2, 3]], [[0], [1], [2], [3]], [[3, 1], [2, 0]])


class AlgorithmContract(PluginContract):
    """Subclass it and override :meth:`plugin`; :meth:`tensor` where the loss needs a tensor library."""

    @pytest.fixture
    def plugin(self) -> Algorithm:
        """An algorithm. It is pure, so every rule may use the same one."""
        override("plugin", "an algorithm")

    @pytest.fixture
    def tensor(self) -> Callable[[Array], Any]:
        """Makes a tensor of the loss's library. As it stands: arrays, and log-probs that know ``+ - *``, ``exp``,
        ``clip`` and ``sum``."""
        return lambda array: array

    @rule("`needs` is answered from the settings alone: it asks for groups of at least 1, and always the same.")
    def test_needs_are_answered_from_the_settings(self, plugin: Algorithm) -> None:
        first, again = plugin.needs(plugin.settings), type(plugin).needs(plugin.settings)
        check(first == again, f"it answered {first} and {again}")
        check(first.min_group_size >= 1, f"it needs groups of {first.min_group_size}")

    @rule("`prepare` adds loss weights (float32, aligned with tokens), denominators (float64) and `trained` (bool).")
    def test_prepared_columns_have_their_dtypes_and_lengths(self, plugin: Algorithm) -> None:
        batch = _groups(UNEQUAL, EQUAL)
        prepared = plugin.prepare(batch)
        weights, denominator = (prepared.columns.get(name) for name in (LOSS_WEIGHTS, DENOMINATOR))
        check(isinstance(weights, Ragged), f"{LOSS_WEIGHTS} is {type(weights).__name__}, a Ragged was expected")
        for name, column in prepared.columns.items():
            if isinstance(column, Ragged):
                same = np.array_equal(column.offsets, batch.ragged(TOKENS).offsets)
                check(same and column.values.dtype == np.float32, f"{name} is {column.values.dtype}, aligned: {same}")
        for name, found, dtype in ((DENOMINATOR, denominator, np.float64), ("trained", prepared.trained, np.bool_)):
            array = np.asarray(found)
            right = array.dtype == dtype and array.shape == (len(batch),)
            check(right, f"{name} is {array.dtype} {list(array.shape)} for {len(batch)} rows")

    @rule("Loss weights are 0 outside `loss_mask`.")
    def test_weights_are_0_outside_the_mask(self, plugin: Algorithm) -> None:
        batch = _groups(UNEQUAL, OTHER)
        outside = _weights(plugin.prepare(batch)).values[~batch.ragged(LOSS_MASK).values]
        check(not outside.any(), f"{np.count_nonzero(outside)} tokens outside the mask have a weight")

    @rule(
        "A row that is trained with any weight adds more than 0 to the denominator of its step, and no row less than 0."
    )
    def test_a_row_that_is_trained_adds_to_the_denominator(self, plugin: Algorithm) -> None:
        prepared = plugin.prepare(_groups(UNEQUAL, EQUAL, OTHER))
        denominator = np.asarray(prepared.columns[DENOMINATOR])
        weighed = np.asarray(prepared.trained, dtype=bool) & [bool(row.any()) for row in _weights(prepared)]
        wrong = np.flatnonzero(~((denominator > 0) | (~weighed & (denominator == 0))))
        added = ", ".join(f"{denominator[row]:g}" for row in wrong)
        check(not len(wrong), f"rows {wrong.tolist()}, of which {int(weighed[wrong].sum())} are trained, add {added}")

    @rule("A group of equal rewards teaches nothing: no row of it has a gradient.")
    def test_a_group_of_equal_rewards_teaches_nothing(self, plugin: Algorithm) -> None:
        needs = plugin.needs(plugin.settings)
        compares = needs.min_group_size > 1 or needs.greedy_reward
        if not needs.rollout or not compares or needs.reference_logprobs:
            pytest.skip("the algorithm does not compare the members of a group, or trains on more than rewards")
        taught = _taught(plugin.prepare(_groups(UNEQUAL, EQUAL)))[4:]
        check(not taught.any(), f"rows {np.flatnonzero(taught).tolist()} of the group have a gradient")

    @rule("A row that could not be scored (reward NaN) is not trained, and makes nothing of its group NaN.")
    def test_a_row_without_a_reward_is_not_trained(self, plugin: Algorithm) -> None:
        if not plugin.needs(plugin.settings).rollout:
            pytest.skip("the algorithm reads no rewards")
        prepared = plugin.prepare(_groups((1.0, math.nan, 0.0, 0.5)))
        check(not _taught(prepared)[1], "the row without a reward has a gradient")
        for name, column in prepared.columns.items():
            values = column.values if isinstance(column, Ragged) else column
            check(np.isfinite(values).all(), f"{name} is not finite")

    @rule(
        "What is prepared for a group does not depend on the other groups, so a denominator is no matter of the batch."
    )
    def test_a_group_does_not_depend_on_the_others(self, plugin: Algorithm) -> None:
        if plugin.needs(plugin.settings).whole_batch:
            pytest.skip("the algorithm compares the groups of a batch with one another, and says so")
        batch = _groups(UNEQUAL, OTHER)
        together = batch.with_columns(plugin.prepare(batch).columns)
        for rows in (range(4), range(4, 8)):
            alone = batch.take(list(rows))
            self._same(plugin.prepare(alone).columns, together.take(list(rows)), "alone and beside another group")

    @rule("What is prepared for a row does not depend on the order of the rows.")
    def test_the_order_of_rows_does_not_matter(self, plugin: Algorithm) -> None:
        batch, order = _groups(UNEQUAL, OTHER), [6, 1, 3, 0, 7, 4, 2, 5]
        straight = batch.with_columns(plugin.prepare(batch).columns)
        self._same(plugin.prepare(batch.take(order)).columns, straight.take(order), "in two orders")

    @rule("`prepare` is pure: it changes nothing it is given.")
    def test_prepare_changes_nothing_it_is_given(self, plugin: Algorithm) -> None:
        batch, untouched = _groups(UNEQUAL, EQUAL), _groups(UNEQUAL, EQUAL)
        plugin.prepare(batch)
        changed = [name for name in STORED if not _equal(batch.columns[name], untouched.columns[name])]
        check(not changed, f"it changed {', '.join(changed)}")

    @rule("The loss is named `module:function` and reads only columns that are stored, prepared, or needed.")
    def test_the_loss_reads_only_columns_that_there_are(self, plugin: Algorithm) -> None:
        spec, needs = plugin.loss(temperature=TEMPERATURE), plugin.needs(plugin.settings)
        check(callable(pkgutil.resolve_name(spec.function)), f"{spec.function!r} names nothing that can be called")
        there = {*STORED, *plugin.prepare(_groups(UNEQUAL)).columns}
        there |= {PROXIMAL_LOGPROBS} if needs.proximal_logprobs else set()
        there |= {REFERENCE_LOGPROBS} if needs.reference_logprobs else set()
        there |= {VALUES} if needs.values else set()
        absent = sorted(set(spec.columns) - there)
        check(not absent, f"it reads {', '.join(absent)}; there are {', '.join(sorted(there))}")

    @rule("A loss on rollouts is of log-probs at the sampling temperature.")
    def test_the_loss_is_at_the_sampling_temperature(self, plugin: Algorithm) -> None:
        if not plugin.needs(plugin.settings).rollout:
            pytest.skip("the algorithm trains on demonstrations")
        found = plugin.loss(temperature=TEMPERATURE).temperature
        check(found == TEMPERATURE, f"sampled at temperature {TEMPERATURE}, trained at {found}")

    @rule("The loss is a sum: its parts over micro-batches add up to the whole, whatever the split.")
    def test_the_loss_is_a_sum(self, plugin: Algorithm, tensor: Callable[[Array], Any]) -> None:
        batch = _groups(UNEQUAL)
        whole, *others = (
            sum(float(_loss(plugin, batch.take(rows), batch, tensor).numerator) for rows in split) for split in SPLITS
        )
        check(math.isfinite(whole), f"the whole is {whole}")
        for other in others:
            check(abs(other - whole) <= 1e-5 * max(abs(whole), 1.0), f"the whole is {whole:.8g}, its parts {other:.8g}")

    @rule("Tokens of weight 0 add nothing to the loss.")
    def test_tokens_of_weight_0_add_nothing(self, plugin: Algorithm, tensor: Callable[[Array], Any]) -> None:
        batch = _groups(UNEQUAL)
        weights = batch.ragged(TOKENS).like(np.zeros(len(batch.ragged(TOKENS).values), dtype=np.float32))
        numerator = float(_loss(plugin, batch, batch, tensor, weights=weights).numerator)
        check(numerator == 0, f"without any weight the numerator is {numerator}")

    @rule("A metric of the loss is (total, count, reduction), with a known reduction.")
    def test_metrics_name_their_reduction(self, plugin: Algorithm, tensor: Callable[[Array], Any]) -> None:
        batch = _groups(UNEQUAL)
        for name, parts in _loss(plugin, batch, batch, tensor).metrics.items():
            known = len(parts) == 3 and parts[2] in get_args(Reduction)
            check(known, f"metric {name!r} is {parts!r}; reductions are {', '.join(get_args(Reduction))}")

    def _same(self, ours: Mapping[str, Column], theirs: Batch, what: str) -> None:
        for name, column in ours.items():
            check(_equal(column, theirs.columns[name]), f"{what}, {name} differs")


def _groups(*rewards: Sequence[float]) -> Batch:
    """Groups of four rows of different lengths, a prompt of two tokens each; with values, rewards of turns, and the
    first member's as that of a greedy answer, which only an algorithm that needs them reads."""
    flat = np.array([reward for group in rewards for reward in group], dtype=np.float32)
    lengths = [2 + 1 + (3 * row) % 5 for row in range(len(flat))]
    generator = np.random.default_rng(0)
    tokens = Ragged.from_arrays([generator.integers(3, 16, n).astype(np.int32) for n in lengths], dtype=np.int32)
    mask = Ragged.from_arrays([np.arange(n) >= 2 for n in lengths], dtype=np.bool_)
    behaviour = np.where(mask.values, -generator.random(len(mask.values)), 0.0).astype(np.float32)
    return Batch(
        rows=np.arange(len(flat)),
        columns={
            TOKENS: tokens,
            LOSS_MASK: mask,
            BEHAVIOUR_LOGPROBS: mask.like(behaviour),
            VALUES: mask.like(np.where(mask.values, 0.25, 0.0).astype(np.float32)),
            REWARD: flat,
            GREEDY_REWARD: np.repeat([group[0] for group in rewards], [len(group) for group in rewards]).astype(
                np.float32
            ),
            TURN_REWARDS: Ragged.from_arrays(
                [np.eye(1, n, n - 1)[0] * r for n, r in zip(lengths, flat, strict=True)], dtype=np.float32
            ),
            GROUP: np.repeat(np.arange(7, 7 + len(rewards)), [len(group) for group in rewards]),
            VERSION: np.zeros(len(flat), dtype=np.int64),
            TRUNCATED: np.zeros(len(flat), dtype=np.bool_),
        },
    )


def _weights(prepared: Prepared) -> Ragged:
    column = prepared.columns[LOSS_WEIGHTS]
    assert isinstance(column, Ragged), "another rule says so"
    return column


def _taught(prepared: Prepared) -> Array:
    """bool [n]: rows that are trained with some weight and, where there are advantages, some advantage."""
    per_token = np.abs(_weights(prepared).values)
    advantages = prepared.columns.get(ADVANTAGES)
    if isinstance(advantages, Ragged):
        per_token = per_token * np.abs(advantages.values)
    pushed = [bool(row.any()) for row in _weights(prepared).like(per_token)]
    taught: Array = np.asarray(prepared.trained, dtype=bool) & np.array(pushed)
    return taught


def _loss(
    plugin: Algorithm,
    part: Batch,
    batch: Batch,
    tensor: Callable[[Array], Any],
    *,
    weights: Ragged | None = None,
) -> LossOutput:
    """The loss of ``part`` with what was prepared for the whole ``batch``, as an engine calls it."""
    prepared = plugin.prepare(batch)
    whole = batch.with_columns({**prepared.columns, **({} if weights is None else {LOSS_WEIGHTS: weights})})
    drift = np.where(batch.ragged(LOSS_MASK).values, 0.05, 0.0).astype(np.float32)
    behaviour = batch.ragged(BEHAVIOUR_LOGPROBS)
    for n, name in enumerate((PROXIMAL_LOGPROBS, REFERENCE_LOGPROBS, "current"), start=1):
        whole = whole.with_columns({name: behaviour.like(behaviour.values - n * drift)})
    rows = whole.take([int(np.flatnonzero(whole.rows == row)[0]) for row in part.rows])
    spec, places = plugin.loss(temperature=TEMPERATURE), np.flatnonzero(rows.ragged(LOSS_MASK).values)
    sequence = np.repeat(np.arange(len(rows)), rows.ragged(TOKENS).lengths)[places]

    def column(name: str) -> Array:
        found = rows.columns[name]
        values: Array = found.values[places] if isinstance(found, Ragged) else found
        return values

    logprobs = tensor(column("current"))
    inputs = LossInputs(
        logprobs=PerToken.of(logprobs) if isinstance(logprobs, np.ndarray) else logprobs,
        weights=tensor(column(LOSS_WEIGHTS)),
        sequence=tensor(sequence),
        sequences=len(rows),
        columns={name: tensor(column(name)) for name in spec.columns},
        entropy=tensor(np.ones(len(places), dtype=np.float32)) if spec.entropy else None,
        values=tensor(np.full(len(places), 0.5, dtype=np.float32)) if spec.values else None,
    )
    output: LossOutput = pkgutil.resolve_name(spec.function)(inputs, **spec.settings)
    return output


def _equal(one: Column, other: Column) -> bool:
    ours, theirs = (c.values if isinstance(c, Ragged) else np.asarray(c) for c in (one, other))
    return ours.dtype == theirs.dtype and np.array_equal(ours, theirs, equal_nan=ours.dtype.kind == "f")
