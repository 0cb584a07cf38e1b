"""Cases G02 and G04: tied weights are sent once and read everywhere; an update that fails leaves nothing half done.
Cases F07 and F10: what an update does to answers in the middle is what was declared, and takes no time of theirs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from headrace.contract import (
    Array,
    GenerationRequest,
    InferenceContext,
    Interruption,
    Sampling,
    TrainingContext,
    TransportContext,
    WeightSource,
)
from headrace.errors import EngineError, WireError
from headrace.registry import PluginSpec
from headrace.services import interruptions, rollout
from headrace.services.messages import LoadCall, Probe, RolloutSetup, VersionCall
from headrace.services.node_messages import NodeSpec
from headrace.services.request_messages import GenerateCall, Generated, SwitchCall
from headrace.services.rollout import RolloutService
from headrace.testing import FakeInferenceEngine, FakeTrainingEngine, FakeWeightTransport
from headrace.testing.suites.serving import manifest_of, other_policy
from headrace.wire import Network
from headrace_torch.checkpoint import create_weights, save_model
from headrace_torch.inference import TorchInferenceEngine, TorchInferenceSettings
from headrace_torch.model import Decoder, ModelConfig
from headrace_torch.training import TorchTrainingEngine, TorchTrainingSettings
from support.desk import Desk, loaded, played, published, turns

TOKENS = np.array([3, 1, 4, 1, 5, 9, 2, 6], dtype=np.int32)
Generating = asyncio.Task[Generated]


# ---------------------------------------------------------------- G02


def decoder(seed: int, *, tied: bool) -> Decoder:
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    model = Decoder(
        ModelConfig(
            model_type="llama",
            vocab_size=20,
            max_position_embeddings=32,
            tie_word_embeddings=tied,
            **shape,
            **heads,
        )
    )
    create_weights(model, seed)
    return model


def saved(model: Decoder, path: Path) -> str:
    save_model(model, str(path), like=None)
    return str(path)


def source(model_path: str) -> dict[str, Array]:
    """What a trainer of this model publishes."""
    engine = TorchTrainingEngine(TorchTrainingSettings(learning_rate=1e-2))
    engine.start(TrainingContext(name="trainer", model_path=model_path, seed=0, threads=1, total_steps=1))
    weights = {name: np.array(tensor) for name, tensor in engine.weight_source().tensors()}
    engine.close()
    return weights


async def serve(model_path: str) -> TorchInferenceEngine:
    engine = TorchInferenceEngine(TorchInferenceSettings())
    await engine.start(InferenceContext(name="rollout-0", model_path=model_path, version=0, threads=1))
    return engine


async def update(engine: TorchInferenceEngine, weights: dict[str, Array], version: int) -> None:
    staged = await engine.begin_update(manifest_of(weights, version))
    for name, tensor in weights.items():
        await staged.apply(name, tensor)
    await staged.commit()


async def test_G02_an_update_of_tied_weights_reaches_the_embedding_and_the_head(tmp_path: Path) -> None:
    old, new = (saved(decoder(seed, tied=True), tmp_path / str(seed)) for seed in (0, 1))
    weights = source(new)
    assert not any("lm_head" in name for name in weights), "one tensor, sent once"
    updated, fresh = await serve(old), await serve(new)
    await update(updated, weights, 1)
    found = await updated.score(TOKENS, version=1, temperature=1.0)
    expected = await fresh.score(TOKENS, version=0, temperature=1.0)
    before = await updated.score(TOKENS, version=0, temperature=1.0)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert np.abs(found - before).max() > 1e-3
    await updated.close()
    await fresh.close()


async def test_G02_a_receiver_that_keeps_two_copies_is_never_left_with_an_old_head(tmp_path: Path) -> None:
    """It says which tensor it lacks, and serves it once both arrive."""
    tied, untied = decoder(1, tied=True), decoder(0, tied=False)
    engine = await serve(saved(untied, tmp_path / "untied"))
    weights = source(saved(tied, tmp_path / "tied"))
    with pytest.raises(EngineError, match=r"the manifest lacks lm_head\.weight"):
        await update(engine, weights, 1)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].copy()
    await update(engine, weights, 1)
    fresh = await serve(str(tmp_path / "tied"))
    found = await engine.score(TOKENS, version=1, temperature=1.0)
    np.testing.assert_allclose(found, await fresh.score(TOKENS, version=0, temperature=1.0), atol=1e-6)
    assert torch.equal(tied.output_weight, tied.model.embed_tokens.weight)
    await engine.close()
    await fresh.close()


# ---------------------------------------------------------------- G04


class Weights(WeightSource):
    def __init__(self, tensors: dict[str, Array]) -> None:
        self._tensors = tensors

    def tensors(self) -> Iterator[tuple[str, Array]]:
        yield from self._tensors.items()


class Instance:
    """A rollout node with a fake engine, whose decode steps wait for the test, and the folder of the weights published
    for it."""

    def __init__(self, folder: Path, **settings: object) -> None:
        model = str(folder / "model")
        FakeTrainingEngine.create_model(model, settings={}, seed=3)
        context = TransportContext(directory=str(folder), name="trainer", host=None, keys=None)
        self.publisher = FakeWeightTransport(FakeWeightTransport.Settings()).publisher(context)
        self.weights = Path(self.publisher.address())
        for version in (0, 1):
            self.publisher.publish(version, Weights(other_policy(model, seed=version)))
        setup = RolloutSetup(
            engine=PluginSpec(role="inference_engine", use="headrace.testing:FakeInferenceEngine", settings=settings),
            transport=PluginSpec(role="weight_transport", use="headrace.testing:FakeWeightTransport"),
            model_path=model,
            publisher=str(self.weights),
            threads=1,
        )
        network = Network.create(str(folder), host=None)
        self.service = RolloutService(
            NodeSpec(
                name="rollout-0",
                role="rollout",
                start=0,
                controller="",
                network=network,
                setup=msgspec.msgpack.encode(setup),
            )
        )

        self.decodes = asyncio.Event()
        self.decodes.set()
        self.engine._trouble.work_async = self._work  # type: ignore[method-assign]  # a step waits for the test

    async def _work(self, what: str) -> None:
        await asyncio.sleep(0)
        await self.decodes.wait()

    @property
    def engine(self) -> FakeInferenceEngine:
        assert isinstance(self.service._engine, FakeInferenceEngine)
        return self.service._engine

    async def load(self, version: int, interruption: Interruption | None = None) -> None:
        probe = Probe(tokens=TOKENS, temperature=1.0)
        await self.service.load_version(LoadCall(version=version, probe=probe, interruption=interruption))

    async def answer(self, version: int) -> list[int]:
        sampling = Sampling(max_new_tokens=8, seed=5)
        request = GenerationRequest(request_id=f"{version}", prompt=TOKENS[:2], sampling=sampling, version=version)
        completion = (await self.service.generate(GenerateCall(request=request))).completion
        assert completion is not None
        return completion.token_ids.tolist()

    async def stop(self) -> None:
        await self.service.cancel_background()
        await self.service.close()
        self.publisher.close()


@pytest.fixture
async def instance(tmp_path: Path) -> AsyncIterator[Instance]:
    instance = Instance(tmp_path)
    await instance.service.start()
    yield instance
    await instance.stop()


async def test_G04_an_update_that_fails_in_the_middle_leaves_the_instance_as_it_was_and_may_be_repeated(
    instance: Instance,
) -> None:
    await instance.load(0)
    before = await instance.answer(0)
    last = max(path for path in (instance.weights / "1").iterdir() if path.name != "manifest.json")
    whole = last.read_bytes()
    last.write_bytes(bytes(byte ^ 1 for byte in whole))
    with pytest.raises(WireError, match="checksum"):
        await instance.load(1)
    health = await instance.service.health(None)
    assert health.versions == (0,)
    assert await instance.answer(0) == before
    with pytest.raises(EngineError, match="live are"):
        await instance.answer(1)
    last.write_bytes(whole)
    await instance.load(1)
    assert await instance.answer(1) != before
    assert await instance.answer(0) == before


async def test_G04_an_instance_that_dies_in_an_update_is_left_behind_and_the_others_go_on() -> None:
    desk = await Desk().begin()
    batch = asyncio.ensure_future(desk.controller.take_batch())
    item = await desk.work("w.0")
    assert item is not None
    await desk.say("w.0", *played(item))
    desk.flow.trained((await batch).lease.lease)
    desk.fleet.published(published(1))
    desk.flow.published(1)
    desk.fleet.sync()
    await turns()
    assert all(peer.waits("load_version") for peer in desk.peers.values())
    _, displaced = desk.fleet.lost("rollout-1")
    desk.controller.instance_lost(displaced)
    desk.peers["rollout-0.0"].answer("load_version", loaded(1))
    await turns()
    assert desk.flow.hosting(1) == ("rollout-0",)
    assert desk.failures == []
    following: Any = await desk.work("w.0")
    assert following.version == 1
    assert {member.instance for member in following.members} == {"rollout-0.0"}


# ---------------------------------------------------------------- F07, F10

ANSWERS, LONG = 16, 100


@pytest.fixture
async def busy(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[tuple[Instance, list[Generating]]]:
    """An engine with room for one version, in the middle of 16 answers under version 0, and standing still."""
    instance = Instance(tmp_path, slots=ANSWERS, live_versions=1, kv_migration=getattr(request, "param", True))
    await instance.service.start()
    await instance.load(0)
    answers = [asyncio.create_task(instance.service.generate(long_answer(number))) for number in range(ANSWERS)]
    while instance.engine._generated < 5 * ANSWERS:  # noqa: ASYNC110 - turns of the loop in which it decodes
        await asyncio.sleep(0)
    instance.decodes.clear()
    yield instance, answers
    for answer in answers:
        answer.cancel()
    await asyncio.wait(answers)
    await instance.stop()


def long_answer(number: int) -> GenerateCall:
    request = GenerationRequest(
        request_id=f"r{number}", prompt=TOKENS[:2], sampling=Sampling(max_new_tokens=LONG, seed=number), version=0
    )
    return GenerateCall(request=request, trajectory=number, movable=True)


def aborting_by_default(engine: FakeInferenceEngine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Whatever is running when it is given weights it aborts, unasked. Returns what it aborts, asked or unasked."""
    commit, abort, aborted = engine._commit, engine.abort, list[str]()

    async def told(request_ids: Sequence[str]) -> None:
        aborted.extend(name for name in request_ids if name in engine._open)
        await abort(request_ids)

    def committing(update: Any) -> None:
        aborted.extend(engine._open)
        engine._outputs.put_nowait([engine._output(running, "aborted") for running in engine._open.values()])
        engine._open.clear()
        commit(update)

    monkeypatch.setattr(engine, "_commit", committing)
    monkeypatch.setattr(engine, "abort", told)
    return aborted


@pytest.mark.parametrize("keep", [True, False])
async def test_F07_an_engine_that_aborts_by_default_aborts_no_more_than_was_declared(
    busy: tuple[Instance, list[Generating]], monkeypatch: pytest.MonkeyPatch, keep: bool
) -> None:
    """When it is given weights nothing is left in it, so that what it would do to that is of no account."""
    instance, answers = busy
    aborted = aborting_by_default(instance.engine, monkeypatch)
    before, interruption = instance.engine._prefilled, Interruption(keep_kv=keep)
    await instance.load(1, interruption)
    switched = await instance.service.switch_version(SwitchCall(version=1, interruption=interruption))
    instance.decodes.set()
    completions = [(await answer).completion for answer in answers]
    assert sorted(aborted) == ([] if keep else sorted(f"r{number}" for number in range(ANSWERS)))
    assert [trajectory for trajectory, _, _ in switched.interrupted] == list(range(ANSWERS)), "each is reported"
    for completion, (_, _, tokens) in zip(completions, switched.interrupted, strict=True):
        assert completion is not None
        assert tokens >= 4, "it goes on after its prefix"
        assert [(s.version, s.start, s.stop) for s in completion.spans] == [(0, 0, tokens), (1, tokens, LONG)]
    again = 0 if keep else sum(2 + tokens for _, _, tokens in switched.interrupted)
    assert (switched.prefilled_tokens, instance.engine._prefilled - before) == (again, again)


@pytest.mark.parametrize(("busy", "keep"), [(True, True), (True, False), (False, False)], indirect=["busy"])
async def test_F10_an_update_that_interrupts_does_not_wait_for_answers_and_says_where_its_time_went(
    busy: tuple[Instance, list[Generating]], monkeypatch: pytest.MonkeyPatch, keep: bool
) -> None:
    """Not a token is generated until it is done. Times are of a clock whose every reading is a second after the one
    before."""
    instance, answers = busy
    seconds = count()
    monkeypatch.setattr(interruptions, "monotonic", lambda: float(next(seconds)))
    interruption = Interruption(keep_kv=keep)
    await instance.load(1, interruption)
    switched = await instance.service.switch_version(SwitchCall(version=1, interruption=interruption))
    assert not any(answer.done() for answer in answers)
    assert (switched.pause_seconds, switched.resume_seconds, switched.stopped_seconds) == (1.0, 1.0, 3.0)


async def test_F10_an_update_that_waits_for_answers_names_them_when_it_has_waited_too_long(
    busy: tuple[Instance, list[Generating]], monkeypatch: pytest.MonkeyPatch
) -> None:
    instance, answers = busy
    for answer in answers[3:]:
        answer.cancel()
    await asyncio.wait(answers[3:])
    monkeypatch.setattr(rollout, "RETIRE_DEADLINE", 0.01)
    with pytest.raises(EngineError, match=r"version 0 is still in use after 0\.01 s, by requests r0, r1, r2"):
        await instance.service.retire_version(VersionCall(version=0))
    instance.decodes.set()
    await asyncio.gather(*answers[:3])
    await instance.service.retire_version(VersionCall(version=0))
