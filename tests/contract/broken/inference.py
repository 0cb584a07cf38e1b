"""Inference engines that break one rule each; ``breaks`` names the rule's test."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from headrace.contract import (
    Array,
    EngineHealth,
    FinishReason,
    GenerationOutput,
    GenerationRequest,
    InferenceCapabilities,
    InferenceEngine,
    VersionSpan,
    WeightManifest,
    WeightUpdate,
)
from headrace.errors import EngineError
from headrace.testing import FakeInferenceEngine, FakeTrainingEngine
from headrace.testing.bigram import Bigram, draw
from headrace.testing.inference import FakeWeightUpdate, Running
from headrace.testing.suites import InferenceEngineContract


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("model"))
    FakeTrainingEngine.create_model(path, settings={}, seed=3)
    return path


class Broken(InferenceEngineContract):
    """Subclasses say which engine."""

    Kind: type[FakeInferenceEngine]

    @pytest.fixture
    def plugin(self) -> InferenceEngine:
        return self.Kind(FakeInferenceEngine.Settings(slots=4, kv_migration=False, adapters=False))

    @pytest.fixture
    def model_path(self, model: str) -> str:
        return model


class Rewrites(FakeInferenceEngine):
    """Changes its outputs on their way out."""

    async def outputs(self) -> AsyncIterator[list[GenerationOutput]]:
        async for outputs in super().outputs():
            yield [self.rewrite(output) for output in outputs]

    def rewrite(self, output: GenerationOutput) -> GenerationOutput:
        raise NotImplementedError


class TestHasNoSlots(Broken):
    breaks = "test_declared_capabilities_are_backed"

    class Kind(FakeInferenceEngine):
        @classmethod
        def capabilities(cls, settings: Any) -> InferenceCapabilities:
            return InferenceCapabilities(slots=4, live_versions=0)


class TestWidensItsLogProbs(Broken):
    breaks = "test_every_token_comes_with_a_log_prob"

    class Kind(Rewrites):
        def rewrite(self, output: GenerationOutput) -> GenerationOutput:
            return replace(output, logprobs=output.logprobs.astype(np.float64))


class TestForgetsTheVersion(Broken):
    breaks = "test_spans_cover_the_tokens_and_name_the_version"

    class Kind(Rewrites):
        def rewrite(self, output: GenerationOutput) -> GenerationOutput:
            spans = tuple(VersionSpan(version=0, start=s.start, stop=s.stop) for s in output.spans)
            return replace(output, spans=spans)


class TestHasLikelinessAboveOne(Broken):
    breaks = "test_log_probs_are_finite_and_at_most_0"

    class Kind(Rewrites):
        def rewrite(self, output: GenerationOutput) -> GenerationOutput:
            return replace(output, logprobs=output.logprobs + np.float32(10))


class TestGivesUntemperedLogProbs(Broken):
    breaks = "test_log_probs_are_at_the_sampling_temperature"

    class Kind(FakeInferenceEngine):
        def _advance(self, running: Running, place: int) -> FinishReason | None:
            reason = super()._advance(running, place)
            previous = running.tokens[-2] if len(running.tokens) > 1 else running.request.prompt[-1]
            untempered = self._models[running.request.version].logprobs(np.array([previous]), temperature=1.0)
            running.logprobs[-1] = float(untempered[0, running.tokens[-1]])
            return reason


class TestIsGreedyAboutTheSecond(Broken):
    breaks = "test_greedy_takes_the_most_likely_token"

    class Kind(FakeInferenceEngine):
        def _advance(self, running: Running, place: int) -> FinishReason | None:
            if running.request.sampling.greedy:
                sampling = replace(running.request.sampling, greedy=False, seed=1)
                running.request = replace(running.request, sampling=sampling)
            return super()._advance(running, place)


class TestIsSeededByItsBirth(Broken):
    breaks = "test_the_same_seed_draws_the_same_tokens"

    class Kind(FakeInferenceEngine):
        births = itertools.count()

        def __init__(self, settings: Any) -> None:
            super().__init__(settings)
            self.birth = next(self.births)

        def _draw(self, logprobs: Array, running: Running, place: int) -> int:
            seed = running.request.sampling.seed + 1000 * self.birth
            return draw(logprobs, seed=seed, position=len(running.tokens))


class TestIgnoresTheSeed(Broken):
    breaks = "test_another_seed_draws_other_tokens"

    class Kind(FakeInferenceEngine):
        def _draw(self, logprobs: Array, running: Running, place: int) -> int:
            return draw(logprobs, seed=0, position=len(running.tokens))


class TestDrawsByPlace(Broken):
    breaks = "test_a_draw_does_not_depend_on_the_batch"

    class Kind(FakeInferenceEngine):
        def _draw(self, logprobs: Array, running: Running, place: int) -> int:
            return draw(logprobs, seed=running.request.sampling.seed, position=1000 * place + len(running.tokens))


class TestSwallowsTheStopToken(Broken):
    breaks = "test_a_stop_token_ends_the_response_and_is_part_of_it"

    class Kind(Rewrites):
        def rewrite(self, output: GenerationOutput) -> GenerationOutput:
            if output.finish_reason != "stop":
                return output
            return replace(output, token_ids=output.token_ids[:-1], logprobs=output.logprobs[:-1])


class TestCallsOneTokenAStop(Broken):
    breaks = "test_the_budget_ends_a_response_with_length"

    class Kind(Rewrites):
        def rewrite(self, output: GenerationOutput) -> GenerationOutput:
            return replace(output, finish_reason="stop") if len(output.token_ids) == 7 else output


class TestSendsEveryPieceAgain(Broken):
    breaks = "test_streamed_pieces_join_to_the_whole"

    class Kind(FakeInferenceEngine):
        def _output(self, running: Running, reason: FinishReason | None) -> GenerationOutput:
            running.told = 0
            return super()._output(running, reason)


class TestStreamsEverything(Broken):
    breaks = "test_an_unstreamed_request_gives_one_output"

    class Kind(FakeInferenceEngine):
        async def submit(self, requests: Sequence[GenerationRequest]) -> None:
            await super().submit([replace(request, stream=True) for request in requests])


class TestDecodesOneByOne(Broken):
    breaks = "test_requests_are_decoded_at_the_same_time"

    class Kind(FakeInferenceEngine):
        def __init__(self, settings: Any) -> None:
            super().__init__(settings)
            self._options = replace(settings, slots=1)


class TestDropsTheAborted(Broken):
    breaks = "test_an_aborted_request_ends_with_aborted"

    class Kind(FakeInferenceEngine):
        async def abort(self, request_ids: Sequence[str]) -> None:
            for name in request_ids:
                self._open.pop(name, None)


class TestAbortsEverybody(Broken):
    breaks = "test_abort_leaves_the_others"

    class Kind(FakeInferenceEngine):
        async def abort(self, request_ids: Sequence[str]) -> None:
            await super().abort(list(self._open))


class TestMindsUnknownRequests(Broken):
    breaks = "test_aborting_unknown_or_finished_requests_is_ignored"

    class Kind(FakeInferenceEngine):
        async def abort(self, request_ids: Sequence[str]) -> None:
            if not set(request_ids) <= set(self._open):
                raise EngineError("unknown requests")
            await super().abort(request_ids)


class TestAcceptsHalf(Broken):
    breaks = "test_a_version_that_is_not_live_refuses_all_that_came_with_it"

    class Kind(FakeInferenceEngine):
        async def submit(self, requests: Sequence[GenerationRequest]) -> None:
            for request in requests:
                await super().submit([request])


class TestRefusesWhatIsTooLong(Broken):
    breaks = "test_a_prompt_that_leaves_no_room_ends_with_length"

    class Kind(FakeInferenceEngine):
        def _check(self, request: GenerationRequest) -> None:
            super()._check(request)
            if self._room(request) < 1:
                raise EngineError("a prompt leaves no room for a token")


class TestCountsNoTokens(Broken):
    breaks = "test_health_counts_what_the_engine_does"

    class Kind(FakeInferenceEngine):
        async def health(self) -> EngineHealth:
            return replace(await super().health(), generated_tokens=0)


class TestClosesOnce(Broken):
    breaks = "test_close_may_come_at_any_time_and_twice"

    class Kind(FakeInferenceEngine):
        async def close(self) -> None:
            if self._decoding is None:
                raise EngineError("not serving")
            await super().close()


class TestNeverEnds(Broken):
    breaks = "test_outputs_end_after_close"

    class Kind(FakeInferenceEngine):
        async def outputs(self) -> AsyncIterator[list[GenerationOutput]]:
            while True:
                outputs = await self._outputs.get()
                if outputs is not None:
                    yield outputs


class TestHidesDigests(Broken):
    breaks = "test_a_committed_version_is_served_and_reported"

    class Kind(FakeInferenceEngine):
        async def health(self) -> EngineHealth:
            return replace(await super().health(), digests={})


class CommitsAnything(FakeInferenceEngine):
    """Takes what is wrong, where it does not mind, from a version it has."""

    def _problems(self, update: FakeWeightUpdate, base: Bigram) -> list[str]:
        problems = super()._problems(update, base)
        kept = [problem for problem in problems if self.minds(problem, update)]
        if not kept:
            update.staged = {
                **base.tensors,
                **{n: t for n, t in update.staged.items() if t.shape == base.tensors[n].shape},
            }
        return kept

    def minds(self, problem: str, update: FakeWeightUpdate) -> bool:
        raise NotImplementedError


class TestFillsTheGaps(Broken):
    breaks = "test_an_incomplete_update_is_refused"

    class Kind(CommitsAnything):
        def minds(self, problem: str, update: FakeWeightUpdate) -> bool:
            return problem.split()[0] in update.staged


class TestTakesAnyShape(Broken):
    breaks = "test_an_update_of_another_shape_is_refused"

    class Kind(CommitsAnything):
        def minds(self, problem: str, update: FakeWeightUpdate) -> bool:
            return problem.split()[0] not in update.staged


class TestCommitsTheAborted(Broken):
    breaks = "test_an_aborted_update_leaves_no_trace"

    class Kind(FakeInferenceEngine):
        async def begin_update(self, manifest: WeightManifest) -> WeightUpdate:
            class Stubborn(FakeWeightUpdate):
                async def abort(self) -> None:
                    await self.commit()

            update = Stubborn(self, manifest, live=manifest.version in self._models)
            self._updates[manifest.version] = update
            return update


class TestBeginsOnce(Broken):
    breaks = "test_a_begun_update_is_replaced_by_another"

    class Kind(FakeInferenceEngine):
        async def begin_update(self, manifest: WeightManifest) -> WeightUpdate:
            if manifest.version in self._updates:
                raise EngineError("this update was begun before")
            return await super().begin_update(manifest)


class TestUpdatesTheLive(Broken):
    breaks = "test_an_update_of_a_live_version_does_nothing"

    class Kind(FakeInferenceEngine):
        async def begin_update(self, manifest: WeightManifest) -> WeightUpdate:
            update = FakeWeightUpdate(self, manifest, live=False)
            self._updates[manifest.version] = update
            return update


class TestCommitsOnce(Broken):
    breaks = "test_repeating_a_call_of_an_update_changes_nothing"

    class Kind(FakeInferenceEngine):
        async def begin_update(self, manifest: WeightManifest) -> WeightUpdate:
            class Once(FakeWeightUpdate):
                async def commit(self) -> None:
                    if self._done and self.staged:
                        raise EngineError("committed before")
                    await super().commit()

            update = Once(self, manifest, live=manifest.version in self._models)
            self._updates[manifest.version] = update
            return update


class TestStopsTheWorld(Broken):
    breaks = "test_staging_does_not_disturb_serving"

    class Kind(FakeInferenceEngine):
        async def begin_update(self, manifest: WeightManifest) -> WeightUpdate:
            await self.abort(list(self._open))
            return await super().begin_update(manifest)


class TestMixesVersions(Broken):
    breaks = "test_live_versions_do_not_mix"

    class Kind(FakeInferenceEngine):
        def _advance(self, running: Running, place: int) -> FinishReason | None:
            newest = max(other.request.version for other in self._open.values())
            running.request = replace(running.request, version=newest)
            return super()._advance(running, place)


class TestMindsUnknownVersions(Broken):
    breaks = "test_retire_forgets_a_version_and_ignores_unknown_ones"

    class Kind(FakeInferenceEngine):
        async def retire(self, version: int) -> None:
            if version not in self._models:
                raise EngineError("unknown version")
            await super().retire(version)


class TestNeedsAnother(Broken):
    breaks = "test_a_version_follows_the_last_one_that_was_retired"

    class Kind(FakeInferenceEngine):
        async def begin_update(self, manifest: WeightManifest) -> WeightUpdate:
            if not self._models:
                raise EngineError("there is no version to begin from")
            return await super().begin_update(manifest)
