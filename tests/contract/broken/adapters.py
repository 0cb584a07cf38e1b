"""Inference engines that break one rule of adapters each; ``breaks`` names the rule's test."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from headrace.contract import FinishReason, InferenceEngine, WeightManifest, WeightUpdate
from headrace.contract.adapters import LORA_A, LORA_B, is_adapter
from headrace.testing import FakeInferenceEngine, FakeTrainingEngine
from headrace.testing.bigram import WEIGHT, Bigram
from headrace.testing.inference import FakeWeightUpdate, Running
from headrace.testing.suites import AdapterContract


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("model"))
    FakeTrainingEngine.create_model(path, settings={}, seed=3)
    return path


class Broken(AdapterContract):
    """Subclasses say which engine."""

    Kind: type[FakeInferenceEngine]

    @pytest.fixture
    def plugin(self) -> InferenceEngine:
        return self.Kind(FakeInferenceEngine.Settings(slots=16))

    @pytest.fixture
    def model_path(self, model: str) -> str:
        return model


class TestServesTheBaseOfTheFirst(Broken):
    breaks = "test_an_adapter_answers_as_the_merged_model"

    class Kind(FakeInferenceEngine):
        def _commit(self, update: FakeWeightUpdate) -> None:
            first = not self._held
            super()._commit(update)
            if first and self._held:
                base = self._models[update.manifest.version].with_tensors(update.tensors())
                self._models[update.manifest.version] = base


class TestWantsEverything(Broken):
    breaks = "test_a_base_that_is_there_is_not_wanted_again"

    class Kind(FakeInferenceEngine):
        async def begin_update(self, manifest: WeightManifest) -> WeightUpdate:
            class Greedy(FakeWeightUpdate):
                def wants(self, name: str) -> bool:
                    return True

            update = Greedy(self, manifest, live=manifest.version in self._models)
            self._updates[manifest.version] = update
            return update


class TestKnowsABaseByItsNames(Broken):
    breaks = "test_another_base_is_wanted"

    class Kind(FakeInferenceEngine):
        async def begin_update(self, manifest: WeightManifest) -> WeightUpdate:
            update = FakeWeightUpdate(self, manifest, live=manifest.version in self._models)
            update._kept = {name: tensor for name, (_, tensor) in self._held.items()}
            self._updates[manifest.version] = update
            return update


class TestMakesUpTheOtherHalf(Broken):
    breaks = "test_half_an_adapter_is_refused"

    class Kind(FakeInferenceEngine):
        def _problems(self, update: FakeWeightUpdate, base: Bigram) -> list[str]:
            halves = [name for name in update.staged if is_adapter(name)]
            if len(halves) == 1:
                layer = WEIGHT.removesuffix("weight")
                other = np.zeros(update.staged[halves[0]].shape[::-1], np.float32)
                update.staged |= {layer + part: other for part in (LORA_A, LORA_B) if layer + part not in halves}
            return super()._problems(update, base)


class TestMixesAdapters(Broken):
    breaks = "test_adapters_of_one_base_do_not_mix"

    class Kind(FakeInferenceEngine):
        def _advance(self, running: Running, place: int) -> FinishReason | None:
            newest = max(other.request.version for other in self._open.values())
            running.request = replace(running.request, version=newest)
            return super()._advance(running, place)
