"""Cases E04, E05, E07 and E08: answers that are cut short, come in pieces or are empty, from the engine to the loss."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from headrace.contract import (
    Array,
    Batch,
    Completion,
    Episode,
    FinishReason,
    GenerationOutput,
    GenerationRequest,
    InferenceContext,
    Ragged,
    Sampling,
    TrainingContext,
    VersionSpan,
)
from headrace.contract.columns import (
    BEHAVIOUR_LOGPROBS,
    DENOMINATOR,
    GROUP,
    LOSS_MASK,
    LOSS_WEIGHTS,
    PROXIMAL_LOGPROBS,
    REWARD,
    TOKENS,
    TRUNCATED,
)
from headrace.errors import ContractError, RunError
from headrace.registry import PluginSpec
from headrace.run.loop import MAX_SKIPPED_IN_A_ROW, TrainingLoop
from headrace.services.messages import RolloutSetup, TrainReply
from headrace.services.node_messages import NodeSpec
from headrace.services.request_messages import GenerateCall
from headrace.services.rollout import RolloutService
from headrace.testing import FakeInferenceEngine
from headrace.wire import Network
from headrace_algorithms.grpo import Grpo
from headrace_algorithms.settings import GrpoSettings
from headrace_torch.training import TorchTrainingEngine, TorchTrainingSettings

PROMPT = np.array([3, 4], dtype=np.int32)
DEADLINE = 60.0


def completion(count: int, reason: FinishReason) -> Completion:
    return Completion(
        token_ids=np.arange(5, 5 + count, dtype=np.int32),
        logprobs=np.full(count, -1.0, dtype=np.float32),
        spans=(VersionSpan(version=1, start=0, stop=count),) if count else (),
        finish_reason=reason,
    )


def conversation(*turns: Completion, reply: Array) -> Episode:
    """An episode of several turns, with an environment's ``reply`` between two of them."""
    parts, sampled, spans, at = [PROMPT], [np.zeros(len(PROMPT), bool)], [], len(PROMPT)
    for number, turn in enumerate(turns):
        if number:
            parts.append(reply)
            sampled.append(np.zeros(len(reply), bool))
            at += len(reply)
        parts.append(turn.token_ids)
        sampled.append(np.ones(len(turn.token_ids), bool))
        spans += [VersionSpan(version=s.version, start=s.start + at, stop=s.stop + at) for s in turn.spans]
        at += len(turn.token_ids)
    mask = np.concatenate(sampled)
    return Episode(
        tokens=np.concatenate(parts),
        loss_mask=mask,
        logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
        spans=tuple(spans),
        finish_reason=turns[-1].finish_reason,
    )


def batch_of(episodes: Sequence[Episode], rewards: Sequence[float]) -> Batch:
    """One group, stored as a worker stores it."""
    return Batch(
        rows=np.arange(len(episodes)),
        columns={
            TOKENS: Ragged.from_arrays([e.tokens for e in episodes], dtype=np.int32),
            LOSS_MASK: Ragged.from_arrays([e.loss_mask for e in episodes], dtype=bool),
            BEHAVIOUR_LOGPROBS: Ragged.from_arrays([e.logprobs for e in episodes], dtype=np.float32),
            REWARD: np.array(rewards, dtype=np.float32),
            GROUP: np.zeros(len(episodes), dtype=np.int64),
            TRUNCATED: np.array([e.finish_reason == "length" for e in episodes]),
        },
    )


# ---------------------------------------------------------------- cut short


def test_E04_one_mask_says_of_a_truncated_sample_that_it_is_not_trained() -> None:
    reply = np.array([9, 9, 9], dtype=np.int32)
    stopped, cut = (conversation(completion(2, "stop"), completion(2, end), reply=reply) for end in ("stop", "length"))
    assert len(stopped.tokens) == len(cut.tokens)
    batch = batch_of([stopped, cut], [1.0, 0.0])
    prepared = Grpo(GrpoSettings(mask_truncated=True)).prepare(batch)
    weights = prepared.columns[LOSS_WEIGHTS]
    assert isinstance(weights, Ragged)
    assert [np.count_nonzero(row) for row in weights] == [4, 0]
    assert np.asarray(prepared.columns[DENOMINATOR]).tolist() == [4, 0]
    assert np.asarray(prepared.trained).tolist() == [True, False]
    assert prepared.metrics["response/truncated_share"].value == 0.5
    assert prepared.metrics["response/length"].value == 4.0, "what was sampled, in both"


# ---------------------------------------------------------------- no room


@pytest.fixture
def engine(tmp_path: Path) -> Callable[..., TorchTrainingEngine]:
    path = str(tmp_path / "model")
    shape = {"architecture": "llama", "alphabet": "abcdefghij", "hidden_size": 16, "layers": 1, "heads": 2}
    TorchTrainingEngine.create_model(path, settings={**shape, "intermediate_size": 24, "max_length": 8}, seed=1)

    def start() -> TorchTrainingEngine:
        engine = TorchTrainingEngine(TorchTrainingSettings(learning_rate=1e-2))
        engine.start(TrainingContext(name="trainer", model_path=path, seed=0, threads=1, total_steps=10))
        return engine

    return start


def stepped(engine: TorchTrainingEngine, batch: Batch) -> tuple[float, bool]:
    """Loss, and whether the step was taken, of one batch, as the trainer's service makes one."""
    algorithm = Grpo(GrpoSettings())
    prepared = algorithm.prepare(batch)
    batch = batch.with_columns(prepared.columns)
    batch = batch.with_columns({PROXIMAL_LOGPROBS: batch.ragged(BEHAVIOUR_LOGPROBS)})
    step = engine.begin_step(algorithm.loss(temperature=1.0))
    step.accumulate(batch.take(np.flatnonzero(prepared.trained)))
    result = step.finish(denominator=float(batch.dense(DENOMINATOR).sum()))
    return result.loss, result.applied


def unplayed(prompt: int) -> Episode:
    """What an engine's answer to a prompt that fills its context makes of an episode."""
    return Episode.single_turn(np.full(prompt, 3, dtype=np.int32), completion(0, "length"))


def test_E08_one_empty_answer_of_four_trains_the_others_and_is_counted(
    engine: Callable[..., TorchTrainingEngine],
) -> None:
    others = [Episode.single_turn(PROMPT, completion(3, "stop")) for _ in range(3)]
    batch = batch_of([unplayed(8), *others], [0.0, 1.0, 0.0, 1.0])
    metrics = Grpo(GrpoSettings()).prepare(batch).metrics
    assert metrics["response/empty_share"].total == 1
    trainer = engine()
    loss, applied = stepped(trainer, batch)
    trainer.close()
    assert np.isfinite(loss)
    assert applied


def test_E08_a_batch_of_empty_answers_has_loss_zero_and_changes_nothing(
    engine: Callable[..., TorchTrainingEngine],
) -> None:
    batch = batch_of([unplayed(8), unplayed(17), unplayed(2), unplayed(2)], [0.0, 1.0, 0.0, 1.0])
    metrics = Grpo(GrpoSettings()).prepare(batch).metrics
    assert metrics["response/empty_share"].total == 4
    assert all(np.isfinite(metric.value) for metric in metrics.values())
    trainer = engine()
    assert stepped(trainer, batch) == (0.0, False)
    trainer.close()


def test_E08_batches_of_empty_answers_in_a_row_stop_the_run_and_say_what_to_look_for(tmp_path: Path) -> None:
    nothing = TrainReply(applied=0, skipped=2, dumped=[], metrics={}, tokens=0, rewards=[], started=0.0, finished=1.0)
    loop = TrainingLoop(SimpleNamespace(directory=SimpleNamespace(path=tmp_path)))  # type: ignore[arg-type]  # no more is used
    for _ in range(MAX_SKIPPED_IN_A_ROW - 1):
        loop._count_skips(nothing)
    with pytest.raises(RunError, match="there was no token to train") as stopped:
        loop._count_skips(nothing)
    assert "prompts that fill the context" in stopped.value.fix
    assert "not_finite" not in str(stopped.value), "there is no such folder"


def test_C07_steps_in_a_row_that_are_not_finite_stop_the_run_and_name_the_folder_with_their_rows(
    tmp_path: Path,
) -> None:
    (tmp_path / "not_finite").mkdir()
    reply = TrainReply(applied=0, skipped=2, dumped=[], metrics={}, tokens=9, rewards=[], started=0.0, finished=1.0)
    loop = TrainingLoop(SimpleNamespace(directory=SimpleNamespace(path=tmp_path)))  # type: ignore[arg-type]  # no more is used
    for _ in range(MAX_SKIPPED_IN_A_ROW - 1):
        loop._count_skips(reply)
    with pytest.raises(RunError, match=r"loss or gradient was not finite\n") as stopped:
        loop._count_skips(reply)
    assert str(tmp_path / "not_finite") in stopped.value.origin


# ---------------------------------------------------------------- in pieces


class Scripted(FakeInferenceEngine):
    """Answers with the outputs that its test gave for the request's id."""

    script: dict[str, list[GenerationOutput]]
    aborted: list[str]

    async def start(self, context: InferenceContext) -> None:
        self.told: asyncio.Queue[list[GenerationOutput]] = asyncio.Queue()

    async def submit(self, requests: Sequence[GenerationRequest]) -> None:
        for request in requests:
            for output in self.script[request.request_id]:
                self.told.put_nowait([output])

    async def outputs(self) -> AsyncIterator[list[GenerationOutput]]:
        while True:
            yield await self.told.get()

    async def abort(self, request_ids: Sequence[str]) -> None:
        self.aborted.extend(request_ids)


def piece(start: int, stop: int, *, name: str, last: bool = False, logprobs: int | None = None) -> GenerationOutput:
    """Tokens ``start`` to ``stop`` of the one answer there is."""
    whole = completion(6, "stop")
    return GenerationOutput(
        request_id=name,
        token_ids=whole.token_ids[start:stop],
        logprobs=whole.logprobs[start : stop if logprobs is None else start + logprobs],
        spans=(VersionSpan(version=1, start=start, stop=stop),) if stop > start else (),
        finish_reason="stop" if last else None,
    )


@pytest.fixture
async def instance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Any]]:
    """Ask an instance whose engine answers with these outputs."""
    module = ModuleType("scripted_engine")
    module.Scripted = Scripted  # type: ignore[attr-defined]  # a module made at run time
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(Scripted, "script", {}, raising=False)
    monkeypatch.setattr(Scripted, "aborted", [], raising=False)
    setup = RolloutSetup(
        engine=PluginSpec(role="inference_engine", use="scripted_engine:Scripted", settings={}),
        transport=PluginSpec(role="weight_transport", use="headrace.testing:FakeWeightTransport", settings={}),
        model_path="",
        publisher=str(tmp_path / "weights"),
        threads=1,
    )
    spec = NodeSpec(
        name="rollout-0",
        role="rollout",
        start=0,
        controller="",
        network=Network.create(str(tmp_path), host=None),
        setup=msgspec.msgpack.encode(setup),
    )
    (tmp_path / "weights").mkdir()
    service = RolloutService(spec)
    await service.start()

    async def ask(*outputs: GenerationOutput) -> Completion:
        name = outputs[0].request_id
        Scripted.script[name] = list(outputs)
        sampling = Sampling(max_new_tokens=6)
        request = GenerationRequest(request_id=name, prompt=PROMPT, sampling=sampling, version=1)
        async with asyncio.timeout(DEADLINE):
            completion = (await service.generate(GenerateCall(request=request))).completion
        assert completion is not None
        return completion

    yield ask
    await service.cancel_background()
    await service.close()


async def test_E07_an_answer_is_the_same_in_however_many_pieces_it_arrives(instance: Callable[..., Any]) -> None:
    whole = await instance(piece(0, 6, name="whole", last=True))
    pieces = await instance(
        *(piece(t, t + 1, name="pieces") for t in range(5)),
        piece(5, 6, name="pieces"),
        piece(6, 6, name="pieces", last=True),
    )
    for found in (whole, pieces):
        episode = Episode.single_turn(PROMPT, found)
        assert episode.tokens.tolist() == [3, 4, 5, 6, 7, 8, 9, 10]
        assert episode.loss_mask.tolist() == [False] * 2 + [True] * 6
        assert episode.logprobs.tolist() == [0.0] * 2 + [-1.0] * 6
        assert episode.spans == (VersionSpan(version=1, start=2, stop=8),)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ([(0, 2, None), (0, 4, None), (0, 6, None)], r"4 tokens, 4 log-probs and spans \[\(0, 4\)\].* from 2 on"),
        ([(0, 2, None), (2, 6, 3)], "4 tokens, 3 log-probs"),
        ([(0, 2, None), (3, 6, None)], "from 2 on"),
    ],
    ids=["cumulative", "a log-prob short", "a gap"],
)
async def test_E07_a_piece_that_is_not_the_next_fails_its_answer_and_no_other(
    instance: Callable[..., Any], wrong: list[tuple[int, int, int | None]], told: str
) -> None:
    outputs = [piece(a, b, name="wrong", logprobs=n, last=b == 6) for a, b, n in wrong]
    with pytest.raises(ContractError, match=told) as refused:
        await instance(*outputs)
    assert "wrong" in refused.value.origin
    assert Scripted.aborted == ["wrong"]
    assert len((await instance(piece(0, 6, name="next", last=True))).token_ids) == 6
