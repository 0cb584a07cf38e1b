"""The rules of the ``training_engine`` role: what it computes here, what it keeps in :mod:`~.keeping`.

class TestMyEngine(TrainingEngineContract):
    @pytest.fixture
    def plugin(self) -> TrainingEngine:
        return MyEngine(MyEngine.Settings(learning_rate=1e-3))

    @pytest.fixture
    def model_path(self) -> str:
        return "models/tiny"
"""

from __future__ import annotations

import numpy as np
import pytest

from headrace.contract import LossSpec, ScratchModels, Snapshots, TrainingEngine
from headrace.contract.columns import LOSS_MASK, LOSS_WEIGHTS
from headrace.testing.suites.keeping import KeepingRules
from headrace.testing.suites.rules import check, rule
from headrace.testing.suites.trainees import LIKELIHOOD, VALUED, rows_of

SPLITS = ([[0, 1, 2, 3, 4, 5]], [[0], [1], [2], [3], [4], [5]], [[5, 0], [3, 1, 4], [2]])
"""Ways to split six rows into micro-batches."""
LARGEST_VOCABULARY = 4096


class TrainingEngineContract(KeepingRules):
    """Subclass it and override :meth:`plugin` and :meth:`model_path`. ``atol``: nats by which a log-prob may depend on
    what is computed beside it; ``rtol``: share by which loss and gradient may depend on the split."""

    @rule("What an engine declares (snapshots, models from scratch) it derives from the class of.")
    def test_declared_capabilities_are_backed(self, plugin: TrainingEngine) -> None:
        declared = plugin.capabilities(plugin.settings)
        for name, wanted, base in (
            ("snapshots", declared.snapshots, Snapshots),
            ("scratch", declared.scratch, ScratchModels),
        ):
            check(not wanted or isinstance(plugin, base), f"it declares {name} and is not {base.__name__}")

    @rule("`forward` gives float32, aligned with `tokens`, and 0 where `loss_mask` is False.")
    def test_outputs_are_aligned_and_0_outside_the_mask(self, plugin: TrainingEngine, model_path: str) -> None:
        with self.training(plugin, model_path) as trainee:
            batch = trainee.batch()
            found = plugin.forward(batch, outputs=("logprobs", "entropy"))
        for name in ("logprobs", "entropy"):
            column, mask = found[name], batch.ragged(LOSS_MASK)
            lengths = column.lengths.tolist()
            check(column.values.dtype == np.float32, f"{name} are {column.values.dtype}")
            check(lengths == mask.lengths.tolist(), f"{name} have lengths {lengths}, tokens {mask.lengths.tolist()}")
            outside = np.flatnonzero(column.values[~mask.values])
            check(not len(outside), f"{name} are not 0 at {len(outside)} tokens outside the mask")

    @rule(
        "Log-probs are those of the tempered distribution: after one prefix, the probabilities of all tokens sum to 1."
    )
    def test_log_probs_are_of_a_tempered_distribution(self, plugin: TrainingEngine, model_path: str) -> None:
        with self.training(plugin, model_path) as trainee:
            if trainee.vocabulary > LARGEST_VOCABULARY:
                pytest.skip(f"a vocabulary of {trainee.vocabulary} is too large to sum over")
            prefix = trainee.tokens(3)
            batch = rows_of([[*prefix, token] for token in range(trainee.vocabulary)], prompt=len(prefix))
            sums, spreads = {}, {}
            for temperature in (1.0, 2.0):
                logprobs = plugin.forward(batch, temperature=temperature)["logprobs"].values[len(prefix) :: 4]
                sums[temperature] = float(np.exp(logprobs.astype(np.float64)).sum())
                spreads[temperature] = float(np.ptp(logprobs))
        for temperature, total in sums.items():
            check(abs(total - 1) < 1e-3, f"at temperature {temperature:g} they sum to {total:.6f}")
        ratio = spreads[1.0] / max(spreads[2.0], 1e-12)
        check(abs(ratio - 2) < 0.05, f"log-probs spread {ratio:.3f} times as far at temperature 1 as at 2, not twice")

    @rule("A row's log-probs do not depend on the rows beside it: packed equals unpacked.")
    def test_a_row_does_not_depend_on_its_neighbours(self, plugin: TrainingEngine, model_path: str) -> None:
        with self.training(plugin, model_path) as trainee:
            batch = trainee.batch()
            together = plugin.forward(batch)["logprobs"]
            for row in range(len(batch)):
                alone = plugin.forward(batch.take([row]))["logprobs"].values
                gap = float(np.abs(alone - together[row]).max())
                check(gap <= self.atol, f"row {row} alone and among {len(batch)} differs by {gap:.2g} nats")

    @rule("Loss and gradient do not depend on the split into micro-batches, nor on their order.")
    def test_the_split_changes_neither_loss_nor_gradient(self, plugin: TrainingEngine, model_path: str) -> None:
        found = []
        for split in SPLITS:
            with self.training(self.fresh(plugin), model_path) as trainee:
                batch = trainee.batch()
                result = trainee.train(*(batch.take(rows) for rows in split))
                found.append((result.loss, result.gradient_norm))
        for name, first, *others in zip(("loss", "gradient norm"), *found, strict=True):
            gap = max(abs(other - first) / abs(first) for other in others)
            check(gap <= self.rtol, f"the {name} of {len(SPLITS)} splits differs by a share of {gap:.2g}")

    @rule("A step divides its sums once, by the denominator it is given.")
    def test_sums_are_divided_by_the_step_s_denominator(self, plugin: TrainingEngine, model_path: str) -> None:
        found = []
        for denominator in (8.0, 32.0):
            with self.training(self.fresh(plugin), model_path) as trainee:
                result = trainee.train(trainee.batch(), denominator=denominator)
                found.append((result.loss, result.gradient_norm))
        for name, small, large in zip(("loss", "gradient norm"), *found, strict=True):
            check(
                abs(small / large - 4) < 1e-3,
                f"the {name} is {small:.6g} for a denominator of 8 and {large:.6g} for one of 32",
            )

    @rule("Nothing outside `loss_mask` reaches the loss.")
    def test_nothing_outside_the_mask_reaches_the_loss(self, plugin: TrainingEngine, model_path: str) -> None:
        losses = []
        for outside in (0.0, float("nan")):
            with self.training(self.fresh(plugin), model_path) as trainee:
                batch = trainee.batch()
                mask = batch.ragged(LOSS_MASK)
                weights = mask.like(np.where(mask.values, 1.0, outside).astype(np.float32))
                losses.append(trainee.train(batch.with_columns({LOSS_WEIGHTS: weights})).loss)
        check(losses[0] == losses[1], f"with weights of 0 and of NaN outside the mask the loss is {losses}")

    @rule("A micro-batch without trainable tokens adds nothing.")
    def test_a_batch_without_trainable_tokens_adds_nothing(self, plugin: TrainingEngine, model_path: str) -> None:
        found = []
        for idle in (False, True):
            with self.training(self.fresh(plugin), model_path) as trainee:
                batch = trainee.batch()
                parts = [rows_of([trainee.tokens(5)], prompt=5), batch] if idle else [batch]
                found.append((trainee.train(*parts).loss, trainee.weights()))
        check(found[0][0] == found[1][0], f"the loss without and with it is {found[0][0]} and {found[1][0]}")
        self.same_weights(found[0][1], found[1][1], "without and with it")

    @rule("A denominator of 0 is a step without trainable tokens: loss 0, gradient 0, nothing applied.")
    def test_a_denominator_of_0_applies_nothing(self, plugin: TrainingEngine, model_path: str) -> None:
        with self.training(plugin, model_path) as trainee:
            before = trainee.weights()
            result = trainee.train(rows_of([trainee.tokens(4)], prompt=4), denominator=0.0)
            after = trainee.weights()
        found = (result.applied, result.loss, result.gradient_norm)
        check(found == (False, 0.0, 0.0), f"applied, loss and gradient norm are {found}")
        self.same_weights(before, after, "before and after the step")

    @rule(
        "Leaving out rows that cannot contribute equals computing them: a step without rows is applied with gradient 0."
    )
    def test_leaving_out_rows_equals_computing_them(self, plugin: TrainingEngine, model_path: str) -> None:
        found = []
        for left_out in (False, True):
            with self.training(self.fresh(plugin), model_path) as trainee:
                batch = trainee.batch()
                trainee.train(batch)
                weights = batch.ragged(LOSS_WEIGHTS)
                zero = batch.with_columns({LOSS_WEIGHTS: weights.like(np.zeros_like(weights.values))})
                result = trainee.train(*([] if left_out else [zero]))
                check(result.applied, f"with {'no' if left_out else 'weightless'} rows the step was not applied")
                found.append(trainee.weights())
        self.same_weights(found[0], found[1], "computed and left out")

    @rule("A step that is discarded leaves no trace, neither in the weights nor in the next step.")
    def test_a_discarded_step_leaves_no_trace(self, plugin: TrainingEngine, model_path: str) -> None:
        found = []
        for disturbed in (False, True):
            with self.training(self.fresh(plugin), model_path) as trainee:
                if disturbed:
                    before = trainee.weights()
                    step = trainee.engine.begin_step(LIKELIHOOD)
                    step.accumulate(trainee.batch(seed=1))
                    step.discard()
                    self.same_weights(before, trainee.weights(), "before and after the discarded step")
                trainee.train(trainee.batch())
                found.append(trainee.weights())
        self.same_weights(found[0], found[1], "without and with a discarded step before it")

    @rule("A loss that is not finite is not applied: weights, optimiser and schedule are unchanged.")
    def test_a_loss_that_is_not_finite_is_not_applied(self, plugin: TrainingEngine, model_path: str) -> None:
        found = []
        for disturbed in (False, True):
            with self.training(self.fresh(plugin), model_path) as trainee:
                trainee.train(trainee.batch())
                if disturbed:
                    loss = LossSpec(function="headrace.testing.losses:not_finite")
                    result = trainee.train(trainee.batch(), loss=loss)
                    check(not result.applied, f"a loss of {result.loss} was applied")
                trainee.train(trainee.batch(seed=1))
                found.append(trainee.weights())
        self.same_weights(found[0], found[1], "without and with such a step between two others")

    @rule("A critic's values are 0 before any training and outside `loss_mask`, and move with a loss that reads them.")
    def test_a_critic_starts_at_0_and_learns(self, plugin: TrainingEngine, model_path: str) -> None:
        with self.training(plugin, model_path, values=True) as trainee:
            first = trainee.values().values
            check(not first.any(), f"before any training {np.count_nonzero(first)} values are not 0")
            trainee.train(trainee.batch(), loss=VALUED)
            mask, then = trainee.batch().ragged(LOSS_MASK).values, trainee.values().values
        check(not then[~mask].any(), "there are values outside the mask")
        check(then[mask].all(), "after a step values are 0 still")

    @rule("Metrics of the micro-batches are merged by the reduction that the loss names.")
    def test_metrics_are_merged_by_their_reduction(self, plugin: TrainingEngine, model_path: str) -> None:
        with self.training(plugin, model_path) as trainee:
            batch = trainee.batch()
            metrics = trainee.train(*(batch.take(rows) for rows in SPLITS[2])).metrics
        check("loss/tokens" in metrics, f"the step's metrics are {sorted(metrics)}, without the loss's own loss/tokens")
        trained, counted = int(batch.ragged(LOSS_MASK).values.sum()), metrics["loss/tokens"].value
        check(counted == trained, f"three micro-batches of {trained} tokens in all counted {counted:g}")

    @rule("Steps go down the gradient: the loss of a batch that is trained again and again falls.")
    def test_steps_lower_the_loss(self, plugin: TrainingEngine, model_path: str) -> None:
        with self.training(plugin, model_path) as trainee:
            losses = [trainee.train(trainee.batch()).loss for _ in range(8)]
        check(losses[-1] < losses[0], f"8 steps on one batch had the losses {[round(loss, 4) for loss in losses]}")
