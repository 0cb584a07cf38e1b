"""What a training engine keeps: weights, saves, snapshots, models from scratch.

Part of the suite of :mod:`~.training`, which a plugin's author subclasses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from headrace.contract import Array, ScratchModels, Snapshots, TrainingEngine
from headrace.contract.adapters import adapted_weight, is_adapter, merged
from headrace.errors import ConfigError, RunError
from headrace.testing.suites.plugin import PluginContract
from headrace.testing.suites.rules import check, override, raises, rule
from headrace.testing.suites.trainees import VALUED, Trainee, training
from headrace.testing.tensors import read_tensors


class KeepingRules(PluginContract):
    """See :class:`~.training.TrainingEngineContract`."""

    atol: ClassVar[float] = 1e-5
    rtol: ClassVar[float] = 1e-6

    @pytest.fixture
    def plugin(self) -> TrainingEngine:
        """A constructed engine; the suite starts and closes it. A learning rate that moves the model in eight steps."""
        override("plugin", "an engine, constructed and not started")

    @pytest.fixture
    def model_path(self) -> str:
        """A Hugging Face-format folder with ``config.json`` and ``*.safetensors``; a context of 32 tokens or more."""
        override("model_path", "the folder of a small model")

    @pytest.fixture
    def scratch(self) -> Mapping[str, Any] | None:
        """A ``[model.scratch]`` table that makes a small model; None: the rules about such models are skipped."""
        return None

    def training(
        self, plugin: TrainingEngine, model_path: str, *, values: bool = False
    ) -> AbstractContextManager[Trainee]:
        """The engine, started on the model; with a critic for ``values``, or the rule is skipped."""
        if values and not plugin.capabilities(plugin.settings).values:
            pytest.skip(f"{type(plugin).__name__} declares no values")
        return training(plugin, model_path, values=values)

    def fresh(self, plugin: TrainingEngine) -> TrainingEngine:
        """Another engine with the same settings."""
        return type(plugin)(plugin.settings)

    def same_weights(self, ours: Mapping[str, Array], theirs: Mapping[str, Array], what: str) -> None:
        """Bit for bit."""
        check(list(ours) == list(theirs), f"{what}, the tensors are {list(ours)} and {list(theirs)}")
        moved = [name for name in ours if ours[name].tobytes() != theirs[name].tobytes()]
        check(not moved, f"{what}, {len(moved)} tensors differ: {', '.join(moved[:3])}")

    @rule("The weight source gives every tensor of the model once, by its Hugging Face name; an adapter's beside them.")
    def test_the_weight_source_gives_every_tensor_once(self, plugin: TrainingEngine, model_path: str) -> None:
        with self.training(plugin, model_path):
            names = Counter(name for name, _ in plugin.weight_source().tensors())
        twice = [name for name, count in names.items() if count > 1]
        check(not twice, f"it gave {', '.join(twice)} more than once")
        stored = set(read_tensors(model_path))
        own = {name for name in names if not is_adapter(name)}
        check(own == stored, f"it gave {sorted(own)}; the folder has {sorted(stored)}")

    @rule("The weight source follows training: after a step it gives the new weights.")
    def test_the_weight_source_follows_training(self, plugin: TrainingEngine, model_path: str) -> None:
        with self.training(plugin, model_path) as trainee:
            before = trainee.weights()
            check(trainee.train(trainee.batch()).applied, "a plain step was not applied")
            after = trainee.weights()
        moved = [name for name in before if before[name].tobytes() != after[name].tobytes()]
        check(moved, "no tensor moved in a step")

    @rule("After `load`, training goes on bit for bit as it did after `save`, snapshots included.")
    def test_training_goes_on_bit_for_bit_after_a_load(
        self, plugin: TrainingEngine, model_path: str, tmp_path: Path
    ) -> None:
        path = str(tmp_path / "save")
        with self.training(plugin, model_path) as trainee:
            if isinstance(plugin, Snapshots):
                plugin.snapshot("kept")
            trainee.train(trainee.batch())
            plugin.save(path, kind="resume")
            expected = _go_on(trainee)
        with self.training(self.fresh(plugin), model_path) as trainee:
            trainee.train(trainee.batch(seed=9))
            trainee.engine.load(path)
            found = _go_on(trainee)
        self.same_weights(expected, found, "without and with a save and a load between")

    @rule("A save that lacks a part is refused with RunError, and the engine stays as it was.")
    def test_a_save_that_lacks_a_part_is_refused_whole(
        self, plugin: TrainingEngine, model_path: str, tmp_path: Path
    ) -> None:
        path = tmp_path / "save"
        with self.training(plugin, model_path) as trainee:
            trainee.train(trainee.batch())
            plugin.save(str(path), kind="resume")
            trainee.train(trainee.batch(seed=1))
            before = trainee.weights()
            for part in sorted(file for file in path.rglob("*") if file.is_file()):
                aside = part.rename(tmp_path / "aside")
                raises(RunError, lambda: plugin.load(str(path)))
                self.same_weights(before, trainee.weights(), f"before and after a load without {part.name}")
                aside.rename(part)

    @rule("An export is a Hugging Face folder with the current weights, adapters merged, and the model's tokenizer.")
    def test_an_export_holds_weights_and_tokenizer(
        self, plugin: TrainingEngine, model_path: str, tmp_path: Path
    ) -> None:
        path = tmp_path / "export"
        with self.training(plugin, model_path) as trainee:
            trainee.train(trainee.batch())
            plugin.save(str(path), kind="export")
            current = trainee.weights()
        exported = read_tensors(path)
        adapted = {adapted_weight(name) for name in current if is_adapter(name)}
        expected = merged(current)
        ours, theirs = (
            {name: tensor for name, tensor in sorted(tensors.items()) if name not in adapted}
            for tensors in (expected, exported)
        )
        self.same_weights(ours, theirs, "current and exported")
        far = [name for name in sorted(adapted) if not _near(expected[name], exported.get(name))]
        check(not far, f"exported {', '.join(far)} are not W + B A")
        wanted = {file.name for file in Path(model_path).iterdir() if file.name.startswith("tokenizer")}
        absent = sorted({"config.json", *wanted} - {file.name for file in path.iterdir()})
        check(not absent, f"the export lacks {', '.join(absent)}")

    @rule("A critic is in `resume` saves and snapshots, and in no weights that are published or exported.")
    def test_a_critic_is_kept_and_not_published(self, plugin: TrainingEngine, model_path: str, tmp_path: Path) -> None:
        save, export = str(tmp_path / "save"), str(tmp_path / "export")
        with self.training(plugin, model_path, values=True) as trainee:
            trainee.train(trainee.batch(), loss=VALUED)
            if isinstance(plugin, Snapshots):
                plugin.snapshot("kept")
            plugin.save(save, kind="resume")
            plugin.save(export, kind="export")
            expected = trainee.values().values
            trainee.train(trainee.batch(), loss=VALUED)
            published = sorted(name for name in trainee.weights() if not is_adapter(name))
            if isinstance(plugin, Snapshots):
                kept = trainee.values(weights="kept").values
                check(np.array_equal(kept, expected), "a snapshot's values are not those of when it was taken")
        with self.training(self.fresh(plugin), model_path, values=True) as trainee:
            trainee.engine.load(save)
            check(np.array_equal(trainee.values().values, expected), "after a load the values are others")
        stored = sorted(read_tensors(model_path))
        for what, names in (("published", published), ("exported", sorted(read_tensors(export)))):
            check(names == stored, f"{what} are {names}; the model has {stored}")

    @rule("A snapshot keeps its weights while training goes on, and one of the same name replaces it.")
    def test_a_snapshot_keeps_its_weights(self, plugin: TrainingEngine, model_path: str) -> None:
        if not isinstance(plugin, Snapshots):
            pytest.skip(f"{type(plugin).__name__} is not Snapshots")
        with self.training(plugin, model_path) as trainee:
            batch = trainee.batch()
            for _ in range(2):
                plugin.snapshot("frozen")
                before = trainee.engine.forward(batch)["logprobs"].values
                trainee.train(batch)
                frozen = trainee.engine.forward(batch, weights="frozen")["logprobs"].values
                current = trainee.engine.forward(batch)["logprobs"].values
                check(np.array_equal(before, frozen), "a snapshot's log-probs are not those of when it was taken")
                check(not np.array_equal(before, current), "the current weights did not move in a step")

    @rule("`drop_snapshot` of an unknown name is ignored.")
    def test_dropping_an_unknown_snapshot_is_ignored(self, plugin: TrainingEngine, model_path: str) -> None:
        if not isinstance(plugin, Snapshots):
            pytest.skip(f"{type(plugin).__name__} is not Snapshots")
        with self.training(plugin, model_path):
            plugin.snapshot("frozen")
            for name in ("frozen", "frozen", "never taken"):
                plugin.drop_snapshot(name)

    @rule("A model from scratch is a function of settings and seed, and the engine can train it.")
    def test_a_model_from_scratch_depends_on_settings_and_seed(
        self, plugin: TrainingEngine, scratch: Mapping[str, Any] | None, tmp_path: Path
    ) -> None:
        made = _needs_scratch(plugin, scratch)
        models = []
        for name, seed in (("first", 1), ("again", 1), ("other", 2)):
            made.create_model(str(tmp_path / name), settings=scratch or {}, seed=seed)
            models.append(read_tensors(tmp_path / name))
        self.same_weights(models[0], models[1], "made twice with one seed")
        check(any(models[0][n].tobytes() != models[2][n].tobytes() for n in models[0]), "another seed made the same")
        with self.training(plugin, str(tmp_path / "first")) as trainee:
            check(trainee.train(trainee.batch()).applied, "the first step was not applied")

    @rule("`check_model` accepts settings that make a model.")
    def test_check_model_accepts_what_makes_a_model(
        self, plugin: TrainingEngine, scratch: Mapping[str, Any] | None
    ) -> None:
        made = _needs_scratch(plugin, scratch)
        made.check_model(scratch or {}, origin=lambda key: f"[model.scratch] {key}")

    @rule("An unknown setting of a model from scratch is a ConfigError that names it.")
    def test_an_unknown_scratch_setting_is_named(
        self, plugin: TrainingEngine, scratch: Mapping[str, Any] | None, tmp_path: Path
    ) -> None:
        made = _needs_scratch(plugin, scratch)
        wrong = {**(scratch or {}), "no_such_setting": 1}
        raises(
            ConfigError,
            lambda: made.create_model(str(tmp_path / "model"), settings=wrong, seed=0),
            naming=("no_such_setting",),
        )

    @rule("`close` may be called at any time, before `start` and twice.")
    def test_close_may_come_at_any_time_and_twice(self, plugin: TrainingEngine, model_path: str) -> None:
        self.fresh(plugin).close()
        with self.training(plugin, model_path):
            plugin.close()


def _go_on(trainee: Trainee) -> dict[str, Array]:
    """The weights after two more steps, and what the snapshot gives."""
    for seed in (2, 3):
        trainee.train(trainee.batch(seed=seed))
    found = trainee.weights()
    if isinstance(trainee.engine, Snapshots):
        found["log-probs of the snapshot"] = trainee.engine.forward(trainee.batch(), weights="kept")["logprobs"].values
    return found


def _needs_scratch(plugin: TrainingEngine, scratch: Mapping[str, Any] | None) -> type[ScratchModels]:
    if not isinstance(plugin, ScratchModels):
        pytest.skip(f"{type(plugin).__name__} is not ScratchModels")
    if scratch is None:
        pytest.skip("override the fixture `scratch` with a [model.scratch] table")
    return type(plugin)


def _near(ours: Array, theirs: Array | None) -> bool:
    """Equal but for the order of sums, and where these were rounded."""
    if theirs is None or theirs.shape != ours.shape or theirs.dtype != ours.dtype:
        return False
    rtol = 1e-5 if ours.dtype == np.float32 else 1e-2
    return bool(np.allclose(ours.astype(np.float32), theirs.astype(np.float32), rtol=rtol, atol=1e-6))
