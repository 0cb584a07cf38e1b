"""An instance that is attached to a running server is as one that starts vLLM, and says what a server lacks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from headrace.contract import InferenceContext, InferenceEngine
from headrace.errors import EngineError
from headrace.testing.suites import InferenceEngineContract
from headrace.testing.suites.serving import request
from headrace.testing.tensors import read_tensors
from headrace_vllm.inference import VllmInferenceEngine
from support.reference_model import gap, write_model
from support.vllm_served import Attached, server, started

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default"), pytest.mark.timeout(300)]

PROMPT = np.arange(3, 9, dtype=np.int32)
CLOSE = 2e-5


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("models")
    first, second = (write_model(folder / name, "qwen3", seed=n) for n, name in enumerate("ab"))
    return first, second


@pytest.fixture(scope="module")
def address(models: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with server(models[0], tmp_path_factory.mktemp("server") / "log") as (address, _):
        yield address


async def test_log_probs_are_those_of_what_was_pushed(models: tuple[str, str], address: str) -> None:
    first, second = models
    async with started(first, address=address) as served:
        asked = [request(f"{v}", PROMPT, version=v, seed=5, max_new_tokens=24, stream=v == 2) for v in (0, 1, 2)]
        (before,) = await served.generate(asked[0])
        await served.push(read_tensors(second), 1)
        (between,) = await served.generate(asked[1])
        await served.push(read_tensors(first), 2)
        (after,) = await served.generate(asked[2])
    assert max(gap(first, PROMPT, before), gap(second, PROMPT, between)) < CLOSE
    assert before.tokens == after.tokens != between.tokens
    assert len(after.outputs) > 1
    assert [(span.version, span.start, span.stop) for span in between.spans] == [(1, 0, 24)]


async def test_temperatures_and_scores_are_as_in_an_engine_of_ones_own(models: tuple[str, str], address: str) -> None:
    async with started(models[0], address=address) as served:
        for temperature in (0.02, 5.0):
            name = f"at {temperature}"
            (answer,) = await served.generate(request(name, PROMPT, temperature=temperature, greedy=True))
            assert gap(models[0], PROMPT, answer, temperature=temperature) < CLOSE / min(temperature, 1.0)
        (drawn,) = await served.generate(request("drawn", PROMPT, temperature=0.7))
        tokens = np.concatenate([PROMPT, np.array(drawn.tokens, np.int32)])
        scores = await served.engine.score(tokens, version=0, temperature=0.7)  # type: ignore[attr-defined]
    assert np.abs(scores[len(PROMPT) :] - np.array(drawn.logprobs)).max() < CLOSE


async def test_aborted_requests_have_what_they_got_streamed_or_not(models: tuple[str, str], address: str) -> None:
    async with started(models[0], address=address) as served:
        names = ["kept", "seen", "early"]
        await served.engine.submit([request(n, PROMPT, stream=n == "seen", max_new_tokens=240) for n in names[:2]])
        while not ("seen" in served.answers and served.answers["seen"].tokens):
            await served.next_outputs("the first token")
        await served.engine.submit([request("early", PROMPT, max_new_tokens=240)])
        await served.engine.abort(names)  # "early" may be on its way yet
        answers = await served.finish(names)
    assert [answer.reason for answer in answers] == ["aborted"] * 3
    assert all(len(answer.tokens) < 240 for answer in answers)
    assert gap(models[0], PROMPT, answers[0]) < CLOSE


async def test_a_server_has_one_instance_at_a_time(models: tuple[str, str], address: str) -> None:
    async with started(models[0], address=address):
        with pytest.raises(EngineError, match="has an instance attached to it already"):
            async with started(models[0], address=address + "/"):
                pass
    async with started(models[0], address=address) as served:
        assert (await served.engine.health()).versions == (0,)


async def test_numbers_of_a_server_are_told(models: tuple[str, str], address: str) -> None:
    async with started(models[0], address=address) as served:
        before = (await served.engine.health()).prefilled_tokens
        await served.engine.submit([request(f"a{n}", PROMPT, stream=True, max_new_tokens=200) for n in range(3)])
        while len(served.answers) < 3:
            await served.next_outputs("first tokens")
        during = await served.engine.health()
        await served.finish([f"a{n}" for n in range(3)])
        after = await served.engine.health()
    assert (during.running, during.waiting) == (3, 0)
    assert 0 < during.kv_used <= 1
    assert after.running + after.waiting == 0
    assert after.prefilled_tokens - before >= len(PROMPT)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"dtype": "bfloat16"}, "--dtype is 'float32' and must be 'bfloat16'"),
        ({"slots": 9}, "--max-num-seqs is 8 and must be 9 at least"),
    ],
)
async def test_a_server_that_is_not_as_the_job_has_it_is_refused(
    models: tuple[str, str], address: str, settings: dict[str, object], said: str
) -> None:
    with pytest.raises(EngineError, match=said):
        async with started(models[0], address=address, **settings):
            pass


async def test_a_server_of_another_model_is_refused_before_it_is_sent_weights(
    models: tuple[str, str], address: str, tmp_path: Path
) -> None:
    other = write_model(tmp_path / "other", "qwen3", seed=0, hidden_size=64)
    with pytest.raises(EngineError, match="hidden_size 128 and 64"):
        async with started(other, address=address):
            pass
    async with started(models[0], address=address) as served:
        (answer,) = await served.generate(request("still", PROMPT))
    assert gap(models[0], PROMPT, answer) < CLOSE


async def test_a_server_that_dies_fails_its_instance(models: tuple[str, str], tmp_path: Path) -> None:
    with server(models[0], tmp_path / "log") as (address, process):
        async with started(models[0], address=address) as served:
            await served.engine.submit([request("open", PROMPT, stream=True, max_new_tokens=240)])
            await served.next_outputs("the first token")
            process.kill()
            with pytest.raises(EngineError, match=address):
                await served.finish(["open"])
            with pytest.raises(EngineError):
                await served.engine.health()


def test_no_server_is_told_with_the_command_that_starts_one(models: tuple[str, str]) -> None:
    engine = VllmInferenceEngine(VllmInferenceEngine.Settings(address="http://127.0.0.1:9"))
    context = InferenceContext(name="rollout-0", model_path=models[0], version=0, threads=1)
    with pytest.raises(EngineError, match="is not reached") as raised:
        asyncio.run(engine.start(context))
    assert "vllm serve MODEL" in str(raised.value)


class TestAttachedVllm(InferenceEngineContract):
    """One server for the whole suite."""

    @pytest.fixture
    def model_path(self, models: tuple[str, str]) -> str:
        return models[0]

    @pytest.fixture
    def plugin(self, address: str) -> InferenceEngine:
        return Attached(VllmInferenceEngine.Settings(address=address, slots=4))
