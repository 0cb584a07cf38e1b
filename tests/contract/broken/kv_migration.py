"""Inference engines that break one rule of migration each; ``breaks`` names the rule's test."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from headrace.contract import InferenceEngine, RequestState
from headrace.errors import EngineError
from headrace.testing import FakeInferenceEngine, FakeTrainingEngine
from headrace.testing.suites import KVMigrationContract


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("model"))
    FakeTrainingEngine.create_model(path, settings={}, seed=3)
    return path


def _is_its_own(state: RequestState) -> bool:
    """Whether it goes on under the version of its tokens."""
    return all(span.version == state.request.version for span in state.spans)


class Broken(KVMigrationContract):
    """Subclasses say which engine."""

    Kind: type[FakeInferenceEngine]

    @pytest.fixture
    def plugin(self) -> InferenceEngine:
        return self.Kind(FakeInferenceEngine.Settings(slots=4))

    @pytest.fixture
    def model_path(self, model: str) -> str:
        return model


class TestDrawsFromTheStart(Broken):
    breaks = "test_a_moved_request_goes_on_as_if_it_had_not_moved"

    class Kind(FakeInferenceEngine):
        async def import_request(self, state: RequestState) -> None:
            if state.kv and not state.request.stream and state.request.request_id.startswith("moves"):
                sampling = replace(state.request.sampling, seed=state.request.sampling.seed + 1)
                state = replace(state, request=replace(state.request, sampling=sampling))
            await super().import_request(state)


class TestPrefillsAgain(Broken):
    breaks = "test_nothing_is_prefilled_again"

    class Kind(FakeInferenceEngine):
        async def import_request(self, state: RequestState) -> None:
            await super().import_request(state)
            self._open[state.request.request_id].cached &= not _is_its_own(state)


class TestNeedsKeysAndValues(Broken):
    breaks = "test_a_request_without_its_keys_and_values_goes_on"

    class Kind(FakeInferenceEngine):
        async def import_request(self, state: RequestState) -> None:
            if len(state.token_ids) and not state.kv and _is_its_own(state):
                raise EngineError("a request without keys and values")
            await super().import_request(state)


class TestSaysThatAllIsNew(Broken):
    breaks = "test_a_request_goes_on_under_another_version"

    class Kind(FakeInferenceEngine):
        async def import_request(self, state: RequestState) -> None:
            await super().import_request(state)
            running = self._open[state.request.request_id]
            running.earlier = tuple(replace(span, version=state.request.version) for span in running.earlier)


class TestRefusesKeysOfOthers(Broken):
    breaks = "test_keys_and_values_stay_under_another_version"

    class Kind(FakeInferenceEngine):
        async def import_request(self, state: RequestState) -> None:
            if state.kv and not _is_its_own(state) and state.request.version in self._models:
                raise EngineError("keys and values of another version")
            await super().import_request(state)


class TestWidensLogProbs(Broken):
    breaks = "test_a_state_holds_the_answer_so_far"

    class Kind(FakeInferenceEngine):
        async def export_request(self, request_id: str) -> RequestState | None:
            state = await super().export_request(request_id)
            return None if state is None else replace(state, logprobs=state.logprobs.astype(np.float64))


class TestKeepsWhatWaits(Broken):
    breaks = "test_a_waiting_request_moves"

    class Kind(FakeInferenceEngine):
        async def export_request(self, request_id: str) -> RequestState | None:
            waiting = list(self._open)[self._options.slots :]
            return None if request_id in waiting else await super().export_request(request_id)


class TestGoesOnAsWell(Broken):
    breaks = "test_a_request_that_was_taken_out_is_gone"

    class Kind(FakeInferenceEngine):
        async def export_request(self, request_id: str) -> RequestState | None:
            running = self._open.get(request_id)
            state = await super().export_request(request_id)
            if running is not None and running.request.stream and request_id.startswith("moves"):
                self._open[request_id] = running
                self._work.set()
            return state


class TestMixesUpTheRest(Broken):
    breaks = "test_requests_beside_it_are_not_disturbed"

    class Kind(FakeInferenceEngine):
        async def export_request(self, request_id: str) -> RequestState | None:
            for name, running in self._open.items():
                if name != request_id and not running.request.stream:
                    running.request = replace(running.request, sampling=replace(running.request.sampling, seed=77))
            return await super().export_request(request_id)


class TestMindsUnknownRequests(Broken):
    breaks = "test_an_unknown_or_finished_request_is_none"

    class Kind(FakeInferenceEngine):
        async def export_request(self, request_id: str) -> RequestState | None:
            if request_id not in self._open:
                raise EngineError("an unknown request")
            return await super().export_request(request_id)


class TestTakesAnyVersion(Broken):
    breaks = "test_a_version_that_is_not_live_is_refused"

    class Kind(FakeInferenceEngine):
        async def import_request(self, state: RequestState) -> None:
            if state.request.version not in self._models:
                state = replace(state, request=replace(state.request, version=max(self._models)))
            await super().import_request(state)


class TestTakesAnyFingerprint(Broken):
    breaks = "test_another_fingerprint_is_refused"

    class Kind(FakeInferenceEngine):
        async def import_request(self, state: RequestState) -> None:
            own = self.fingerprint(state.request.version) if state.kv and state.request.version in self._models else ""
            await super().import_request(replace(state, fingerprint=own or state.fingerprint))


class TestTakesAnyShape(Broken):
    breaks = "test_another_shape_is_refused"

    class Kind(FakeInferenceEngine):
        def _misfit(self, state: RequestState) -> str:
            return super()._misfit(replace(state, kv=())) or (
                "other weights" if state.kv and state.fingerprint != self.fingerprint(state.request.version) else ""
            )


class TestCountsWeightsAsOne(Broken):
    breaks = "test_the_fingerprint_tells_weights_apart"

    class Kind(FakeInferenceEngine):
        def fingerprint(self, version: int) -> str:
            return "bigram"
